// What Linux, macOS and Windows do differently. Every text is UTF-8.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace host {

extern const char *const LIBRARY_FILE_NAME;

// Throws with the system's own words.
void *open_shared(const std::string &path);
// Null if the library has no such function.
void *find_symbol(void *opened, const char *name);

std::filesystem::path executable_folder();

// The arguments of main, which Windows hands out in a code page.
std::vector<std::string> arguments(int argc, char **argv);

// Whether progress can be redrawn in place.
bool stderr_is_a_terminal();

} // namespace host
