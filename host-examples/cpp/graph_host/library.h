// The library, opened at run time: every function of video_vae.h as a pointer of the same name.
//
// The header gives the types; nothing of it is linked. A function that an older library lacks is null, which is how a
// host tells what a library can do.
#pragma once

#include <string>

#include "video_vae.h"

namespace host {

// One list makes the table and fills it, so the two cannot differ.
#define VVAE_FUNCTIONS(X)                                                                                              \
    X(vvae_create) X(vvae_configure) X(vvae_free) X(vvae_model_info) X(vvae_cancel) X(vvae_error) X(vvae_memory)       \
    X(vvae_trim) X(vvae_encode) X(vvae_decode) X(vvae_plan) X(vvae_stream_open) X(vvae_stream_push)                    \
    X(vvae_stream_pull) X(vvae_stream_close) X(vvae_abi_version) X(vvae_version) X(vvae_device_count)                  \
    X(vvae_device_info)                                                                                                \
    X(vvae_node_count) X(vvae_node_info) X(vvae_port_count) X(vvae_port_info) X(vvae_param_count) X(vvae_param_info)   \
    X(vvae_choice_count) X(vvae_choice)

struct Library {
#define VVAE_POINTER(name) decltype(&::name) name = nullptr;
    VVAE_FUNCTIONS(VVAE_POINTER)
#undef VVAE_POINTER
    std::string path; // UTF-8
};

// Opens the library and looks up all of it. Throws if it cannot be opened, speaks another ABI, or lacks a function
// that this host cannot do without. It stays open until the process ends.
Library open_library(const std::string &path);

// $VIDEO_VAE_LIBRARY, else the one beside this executable, else the one that this host was built with.
std::string find_library();

// What went wrong in a call that just failed on this thread.
[[noreturn]] void fail(const Library &library, const std::string &doing);

} // namespace host
