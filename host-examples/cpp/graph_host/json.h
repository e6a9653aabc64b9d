// Reads JSON: enough for a file that people write by hand, with errors that say the line.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace host {

struct Json {
    enum class Kind { Null, Bool, Number, String, Array, Object };

    Kind kind = Kind::Null;
    // The string, or the number or word as it was written: parameters pass on "0.9152" as it stands.
    std::string text;
    // Elements or members in the order of the file; elements have no name.
    std::vector<std::pair<std::string, Json>> items;
    int line = 0;

    bool is(Kind other) const { return kind == other; }
    // A member of an object, null if there is none.
    const Json *find(const std::string &name) const;
};

// Throws std::runtime_error: "line 3: ...".
Json parse_json(const std::string &text);

} // namespace host
