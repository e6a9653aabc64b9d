#include "json.h"

#include <cstring>
#include <stdexcept>

namespace host {

namespace {

// Deeper than any graph, shallower than any stack.
constexpr int MOST_DEPTH = 64;

class Parser {
public:
    explicit Parser(const std::string &text) : at_(text.data()), end_(text.data() + text.size()) {}

    Json document() {
        Json value = this->value(0);
        space();
        if (at_ != end_) fail("something follows the end");
        return value;
    }

private:
    [[noreturn]] void fail(const std::string &why) const {
        throw std::runtime_error("line " + std::to_string(line_) + ": " + why);
    }

    void space() {
        for (; at_ != end_ && std::strchr(" \t\r\n", *at_) && *at_; at_++) line_ += *at_ == '\n';
    }

    // The next character that is no space, left where it is; 0 at the end.
    char peek() {
        space();
        return at_ != end_ ? *at_ : '\0';
    }

    void expect(char wanted) {
        if (peek() != wanted) fail(std::string("expected '") + wanted + "'");
        at_++;
    }

    Json value(int depth) {
        if (depth > MOST_DEPTH) fail("nested too deeply");
        Json value;
        char first = peek();
        value.line = line_;
        if (first == '{' || first == '[') {
            collection(value, first, depth);
        } else if (first == '"') {
            value.kind = Json::Kind::String;
            value.text = string();
        } else {
            word(value);
        }
        return value;
    }

    void collection(Json &value, char open, int depth) {
        bool object = open == '{';
        char close = object ? '}' : ']';
        value.kind = object ? Json::Kind::Object : Json::Kind::Array;
        expect(open);
        if (peek() != close) {
            do {
                std::string name;
                if (object) {
                    if (peek() != '"') fail("expected a name in quotes");
                    name = string();
                    if (value.find(name)) fail("\"" + name + "\" is there twice");
                    expect(':');
                }
                value.items.emplace_back(name, this->value(depth + 1));
            } while (peek() == ',' && at_++);
        }
        if (peek() != close) fail(std::string("expected ',' or '") + close + "'");
        at_++;
    }

    // true, false, null or a number.
    void word(Json &value) {
        while (at_ != end_ && *at_ && std::strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", *at_)) value.text += *at_++;
        char first = value.text.empty() ? '\0' : value.text[0];
        if (value.text == "true" || value.text == "false") {
            value.kind = Json::Kind::Bool;
        } else if (value.text == "null") {
            value.kind = Json::Kind::Null;
        } else if (first == '-' || (first >= '0' && first <= '9')) {
            value.kind = Json::Kind::Number;
            std::size_t used = 0;
            try {
                std::stod(value.text, &used);
            } catch (const std::exception &) {
            }
            if (used != value.text.size()) fail("\"" + value.text + "\" is no number");
        } else {
            fail(value.text.empty() ? "expected a value" : "\"" + value.text + "\" is no value; texts need quotes");
        }
    }

    std::string string() {
        std::string out;
        expect('"');
        while (true) {
            if (at_ == end_ || *at_ == '\n') fail("a text without its closing quote");
            char c = *at_++;
            if (c == '"') return out;
            if (c != '\\') {
                out += c;
                continue;
            }
            static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
            char escape = at_ != end_ ? *at_++ : '\0';
            const char *known = escape ? std::strchr(names, escape) : nullptr;
            if (known) {
                out += values[known - names];
            } else if (escape == 'u') {
                unicode(out);
            } else {
                fail("an escape that JSON does not have");
            }
        }
    }

    unsigned four_digits() {
        unsigned code = 0;
        for (int i = 0; i < 4; i++) {
            char c = at_ != end_ ? *at_++ : '\0';
            unsigned digit = c >= '0' && c <= '9'   ? unsigned(c - '0')
                             : c >= 'a' && c <= 'f' ? unsigned(c - 'a' + 10)
                             : c >= 'A' && c <= 'F' ? unsigned(c - 'A' + 10)
                                                    : 16;
            if (digit == 16) fail("\\u needs four hexadecimal digits");
            code = code * 16 + digit;
        }
        return code;
    }

    // \u and four digits, as UTF-8. A character beyond the first 65,536 is written as two of these, one after the other.
    void unicode(std::string &out) {
        unsigned code = four_digits();
        if (code >= 0xd800 && code < 0xdc00) {
            if (end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u') fail("half a character");
            at_ += 2;
            unsigned low = four_digits();
            if (low < 0xdc00 || low > 0xdfff) fail("half a character");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        } else if (code >= 0xdc00 && code < 0xe000) {
            fail("half a character");
        }
        auto put = [&](unsigned byte) { out += static_cast<char>(byte); };
        if (code < 0x80) {
            put(code);
        } else if (code < 0x800) {
            put(0xc0 | code >> 6), put(0x80 | (code & 63));
        } else if (code < 0x10000) {
            put(0xe0 | code >> 12), put(0x80 | (code >> 6 & 63)), put(0x80 | (code & 63));
        } else {
            put(0xf0 | code >> 18), put(0x80 | (code >> 12 & 63)), put(0x80 | (code >> 6 & 63)), put(0x80 | (code & 63));
        }
    }

    const char *at_, *end_;
    int line_ = 1;
};

} // namespace

const Json *Json::find(const std::string &name) const {
    for (const auto &item : items) {
        if (kind == Kind::Object && item.first == name) return &item.second;
    }
    return nullptr;
}

Json parse_json(const std::string &text) { return Parser(text).document(); }

} // namespace host
