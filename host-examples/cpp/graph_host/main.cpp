// graph_host: a host of node packs, in small. Opens video-vae at run time, shows what it has, and runs graphs of it.
#include <cstdio>
#include <exception>

#include "catalog.h"
#include "graph.h"
#include "interrupt.h"
#include "job.h"
#include "platform.h"

namespace {

const char *const USAGE = "usage: graph_host [--library FILE] nodes        devices, nodes, ports and parameters\n"
                          "       graph_host [--library FILE] GRAPH.json   run a graph\n"
                          "The library is FILE, else $VIDEO_VAE_LIBRARY, else the one beside this program.\n";

int start(std::vector<std::string> words) {
    std::string path;
    if (words.size() > 2 && words[1] == "--library") {
        path = words[2];
        words.erase(words.begin() + 1, words.begin() + 3);
    }
    if (words.size() != 2 || words[1].rfind("--", 0) == 0) {
        std::fputs(USAGE, stderr);
        return 2;
    }
    // Never closed: its functions are used until the end.
    static const host::Library library = host::open_library(path.empty() ? host::find_library() : path);
    host::watch_for_interrupts(library);
    host::Catalog catalog = host::make_catalog(library);
    if (words[1] == "nodes") {
        host::print_catalog(library, catalog);
    } else {
        host::run_graph(library, host::read_graph(std::filesystem::u8path(words[1]), catalog));
    }
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    try {
        return start(host::arguments(argc, argv));
    } catch (const host::Interrupted &) {
        std::fprintf(stderr, "graph_host: interrupted\n");
        return host::INTERRUPTED_EXIT_CODE;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "graph_host: %s\n", error.what());
        return 1;
    }
}
