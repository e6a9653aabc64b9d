// Runs a graph: first plans every node of the library's and shows that, then does the work.
#pragma once

#include "graph.h"
#include "library.h"

namespace host {

void run_graph(const Library &library, const Graph &graph);

} // namespace host
