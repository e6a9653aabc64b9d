#include <cstdio>

#include <video_vae.hpp>

int main() {
    std::printf("video-vae %s with %zu devices\n", vvae_version(), video_vae::devices().size());
    return vvae_abi_version() >> 16 == VVAE_ABI_MAJOR ? 0 : 1;
}
