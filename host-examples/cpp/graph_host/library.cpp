#include "library.h"

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "platform.h"

namespace host {

namespace {

template <class F> void look_up(void *opened, F &pointer, const char *name) {
    pointer = reinterpret_cast<F>(find_symbol(opened, name));
}

} // namespace

Library open_library(const std::string &path) {
    Library library;
    library.path = path;
    void *opened = open_shared(path);
#define VVAE_LOOK_UP(name) look_up(opened, library.name, #name);
    VVAE_FUNCTIONS(VVAE_LOOK_UP)
#undef VVAE_LOOK_UP

    // The version comes first: with another major, the other functions may mean anything.
    if (!library.vvae_abi_version) throw std::runtime_error(path + " is no video-vae library");
    uint32_t major = library.vvae_abi_version() >> 16;
    if (major != VVAE_ABI_MAJOR) {
        throw std::runtime_error(path + " speaks ABI " + std::to_string(major) + ", this host ABI " +
                                 std::to_string(VVAE_ABI_MAJOR) + "; build both from one source");
    }
    // Streams, trim and memory figures are not used here, so a library without them would do.
    bool enough = library.vvae_create && library.vvae_configure && library.vvae_free && library.vvae_cancel &&
                  library.vvae_error && library.vvae_plan && library.vvae_node_count && library.vvae_node_info &&
                  library.vvae_port_count && library.vvae_port_info && library.vvae_param_count &&
                  library.vvae_param_info;
    if (!enough) throw std::runtime_error(path + " lacks functions of ABI 2; put a complete video-vae there");
    return library;
}

std::string find_library() {
    if (const char *named = std::getenv("VIDEO_VAE_LIBRARY")) return named;
    auto folder = executable_folder(); // empty where the system does not tell
    auto beside = folder / LIBRARY_FILE_NAME;
    if (!folder.empty() && std::filesystem::exists(beside)) return beside.u8string();
    return VIDEO_VAE_BUILT_WITH;
}

void fail(const Library &library, const std::string &doing) {
    // With NULL, the text is that of the calling thread's last failure, whichever handle it was about.
    std::string text(static_cast<std::size_t>(library.vvae_error(nullptr, nullptr, 0)), '\0');
    library.vvae_error(nullptr, text.data(), text.size() + 1);
    throw std::runtime_error(doing + ": " + text);
}

} // namespace host
