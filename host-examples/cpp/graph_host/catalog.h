// The node types that a graph can use: what the library says it has, and this host's own ends for them.
#pragma once

#include <string>
#include <vector>

#include "library.h"

namespace host {

struct Port {
    std::string name, kind, help;
    bool input = false, optional = false;
    std::vector<uint32_t> dtypes;
};

struct Param {
    // Beside VVAE_PARAM_INT and its like, which the host's own nodes use too: a text, which the library never asks for.
    static constexpr uint32_t TEXT = 1000;

    std::string key, default_value, unit, help;
    uint32_t kind = TEXT, flags = 0;
    double min = 0, max = 0, step = 0;
    std::vector<std::string> choices{};
};

struct NodeType {
    std::string id, label, help;
    bool from_library = false;
    std::vector<Port> ports;
    std::vector<Param> params;

    const Port *port(const std::string &name) const;
    const Param *param(const std::string &key) const;
};

using Catalog = std::vector<NodeType>;

Catalog make_catalog(const Library &library);

// As a host's UI would show it: devices, then every node with its ports and parameters.
void print_catalog(const Library &library, const Catalog &catalog);

} // namespace host
