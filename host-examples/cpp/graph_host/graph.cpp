#include "graph.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

#include "json.h"

namespace host {

namespace {

[[noreturn]] void wrong(const Json &where, const std::string &why) {
    throw std::runtime_error("line " + std::to_string(where.line) + ": " + why);
}

template <class Items, class Name> std::string names(const Items &items, Name name) {
    std::string text;
    for (const auto &item : items) text += (text.empty() ? "" : ", ") + name(item);
    return text.empty() ? "none" : text;
}

// A member that has to be there, of this kind.
const Json &member(const Json &object, const std::string &name, Json::Kind kind, const char *what) {
    const Json *found = object.find(name);
    if (!found || !found->is(kind)) wrong(found ? *found : object, "\"" + name + "\" has to be there and be " + what);
    return *found;
}

void known_members(const Json &object, const std::vector<std::string> &known) {
    for (const auto &[name, value] : object.items) {
        bool is_known = false;
        for (const auto &one : known) is_known |= one == name;
        if (!is_known) {
            wrong(value, "\"" + name + "\" means nothing here; there is " + names(known, [](auto &n) { return n; }));
        }
    }
}

class Reader {
public:
    Reader(const std::filesystem::path &folder, const Catalog &catalog) : folder_(folder), catalog_(catalog) {}

    Graph read(const Json &root) {
        if (!root.is(Json::Kind::Object)) wrong(root, "a graph is an object: { \"checkpoint\": ..., \"nodes\": ... }");
        known_members(root, {"checkpoint", "device", "nodes", "links"});
        graph_.checkpoint = resolve(member(root, "checkpoint", Json::Kind::String, "the path of a checkpoint").text);
        if (root.find("device")) graph_.device = member(root, "device", Json::Kind::String, "a text").text;
        for (const auto &item : member(root, "nodes", Json::Kind::Array, "a list").items) add_node(item.second);
        for (const auto &item : member(root, "links", Json::Kind::Array, "a list").items) add_link(item.second);
        check_inputs(root);
        sort(root);
        return std::move(graph_);
    }

private:
    std::string resolve(const std::string &path) const {
        return (folder_ / std::filesystem::u8path(path)).lexically_normal().u8string();
    }

    void add_node(const Json &json) {
        if (!json.is(Json::Kind::Object)) wrong(json, "a node is an object: { \"id\": ..., \"type\": ... }");
        known_members(json, {"id", "type", "params"});
        Node node;
        node.id = member(json, "id", Json::Kind::String, "a text").text;
        const Json &type = member(json, "type", Json::Kind::String, "a text");
        for (const auto &other : graph_.nodes) {
            if (other.id == node.id) wrong(json, "there are two nodes \"" + node.id + "\"");
        }
        for (const NodeType &known : catalog_) {
            if (known.id == type.text) node.type = &known;
        }
        if (!node.type) {
            wrong(type, "no node type \"" + type.text + "\"; there is " +
                            names(catalog_, [](const NodeType &known) { return known.id; }));
        }
        for (const Param &param : node.type->params) node.params[param.key] = param.default_value;
        if (json.find("params")) {
            for (const auto &[key, value] : member(json, "params", Json::Kind::Object, "an object").items) {
                set(node, key, value);
            }
        }
        graph_.nodes.push_back(node);
    }

    void set(Node &node, const std::string &key, const Json &value) {
        if (!node.type->param(key)) {
            wrong(value, "node \"" + node.id + "\" (" + node.type->id + ") has no parameter \"" + key + "\"; it has " +
                             names(node.type->params, [](const Param &param) { return param.key; }));
        }
        if (value.is(Json::Kind::Array) || value.is(Json::Kind::Object) || value.is(Json::Kind::Null)) {
            wrong(value, "\"" + key + "\" has to be a text, a number, true or false");
        }
        // The library takes every value as text and checks it itself; numbers pass as they were written.
        node.params[key] = !node.type->from_library && key == "path" ? resolve(value.text) : value.text;
    }

    // "node.port" on the given side.
    std::pair<std::size_t, const Port *> end(const Json &json, bool input) {
        auto dot = json.text.rfind('.');
        if (!json.is(Json::Kind::String) || dot == std::string::npos) wrong(json, "a link's end is \"node.port\"");
        std::string id = json.text.substr(0, dot), name = json.text.substr(dot + 1);
        for (std::size_t i = 0; i < graph_.nodes.size(); i++) {
            const Node &node = graph_.nodes[i];
            if (node.id != id) continue;
            const Port *port = node.type->port(name);
            if (port && port->input == input) return {i, port};
            std::vector<std::string> there;
            for (const Port &other : node.type->ports) {
                if (other.input == input) there.push_back(other.name);
            }
            wrong(json, "node \"" + id + "\" (" + node.type->id + ") has no " + (input ? "input" : "output") + " \"" +
                            name + "\"; it has " + names(there, [](auto &n) { return n; }));
        }
        wrong(json, "no node \"" + id + "\"; there is " + names(graph_.nodes, [](const Node &node) { return node.id; }));
    }

    void add_link(const Json &json) {
        if (!json.is(Json::Kind::Array) || json.items.size() != 2) wrong(json, "a link is [\"node.output\", \"node.input\"]");
        const Json &left = json.items[0].second, &right = json.items[1].second;
        auto [from, output] = end(left, false);
        auto [to, input] = end(right, true);
        if (output->kind != input->kind) {
            wrong(json, "\"" + left.text + "\" is " + output->kind + ", \"" + right.text + "\" takes " + input->kind);
        }
        if (!graph_.nodes[to].inputs.insert({input->name, {from, output->name}}).second) {
            wrong(json, "\"" + right.text + "\" is linked already");
        }
    }

    void check_inputs(const Json &root) {
        for (const Node &node : graph_.nodes) {
            for (const Port &port : node.type->ports) {
                if (port.input && !port.optional && !node.inputs.count(port.name)) {
                    wrong(root, "nothing is linked to \"" + node.id + "." + port.name + "\", which needs " + port.kind);
                }
            }
        }
    }

    // Puts every node after its sources.
    void sort(const Json &root) {
        std::vector<Node> sorted;
        std::map<std::size_t, std::size_t> place; // in the file -> in the order of work
        while (sorted.size() < graph_.nodes.size()) {
            std::size_t before = sorted.size();
            for (std::size_t i = 0; i < graph_.nodes.size(); i++) {
                bool ready = !place.count(i);
                for (const auto &[_, source] : graph_.nodes[i].inputs) ready = ready && place.count(source.node);
                if (!ready) continue;
                Node node = graph_.nodes[i];
                for (auto &[_, source] : node.inputs) source.node = place[source.node];
                place[i] = sorted.size();
                sorted.push_back(node);
            }
            if (sorted.size() == before) wrong(root, "the links go round in a circle");
        }
        graph_.nodes = std::move(sorted);
    }

    std::filesystem::path folder_;
    const Catalog &catalog_;
    Graph graph_;
};

} // namespace

bool Graph::is_used(std::size_t node, const std::string &port) const {
    for (const Node &reader : nodes) {
        for (const auto &[_, source] : reader.inputs) {
            if (source.node == node && source.port == port) return true;
        }
    }
    return false;
}

Graph read_graph(const std::filesystem::path &file, const Catalog &catalog) {
    std::ifstream in(file, std::ios::binary);
    if (!in) throw std::runtime_error(file.u8string() + " cannot be read");
    std::string text{std::istreambuf_iterator<char>(in), {}};
    try {
        return Reader(file.parent_path(), catalog).read(parse_json(text));
    } catch (const std::runtime_error &error) {
        throw std::runtime_error(file.u8string() + ", " + error.what());
    }
}

} // namespace host
