// A graph: nodes with their parameters, and links from outputs to inputs. Read from a file and checked whole, so that
// what runs later can only fail for reasons of its own.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "catalog.h"

namespace host {

struct Node {
    std::string id;
    const NodeType *type = nullptr;
    // All of the type's parameters: those of the file, and defaults for the rest.
    std::map<std::string, std::string> params;
    // For each linked input, the node and the output that feed it.
    struct Source {
        std::size_t node;
        std::string port;
    };
    std::map<std::string, Source> inputs;
};

struct Graph {
    std::string checkpoint, device = "auto";
    // A node comes after all that feed it.
    std::vector<Node> nodes;

    // Whether anything reads this output.
    bool is_used(std::size_t node, const std::string &port) const;
};

// Paths in the file are relative to its folder. Throws std::runtime_error with what is wrong and what would be right.
Graph read_graph(const std::filesystem::path &file, const Catalog &catalog);

} // namespace host
