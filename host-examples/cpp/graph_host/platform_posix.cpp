#include "platform.h"

#include <dlfcn.h>
#include <stdexcept>
#include <unistd.h>

namespace host {

#ifdef __APPLE__
const char *const LIBRARY_FILE_NAME = "libvideo_vae.dylib";
#else
const char *const LIBRARY_FILE_NAME = "libvideo_vae.so";
#endif

void *open_shared(const std::string &path) {
    // Now, so that a broken library fails here and not in the middle of a job; local, so that its symbols meet no others.
    void *opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!opened) throw std::runtime_error(std::string("cannot open the library: ") + dlerror());
    return opened;
}

void *find_symbol(void *opened, const char *name) { return dlsym(opened, name); }

std::filesystem::path executable_folder() {
    std::error_code none;
    return std::filesystem::read_symlink("/proc/self/exe", none).parent_path();
}

std::vector<std::string> arguments(int argc, char **argv) { return {argv, argv + argc}; }

bool stderr_is_a_terminal() { return isatty(2) == 1; }

} // namespace host
