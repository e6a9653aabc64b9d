/* A host that was built with the header of ABI 1.0. The library has another major, so vvae_create says so. */
#include <stdio.h>
#include <string.h>

#include "video_vae.h"

#if VVAE_ABI_VERSION != (1 << 16)
#error "this needs the header of ABI 1.0"
#endif

static int fail(const char *what, const char *why) {
    printf("%s: %s\n", what, why);
    return 1;
}

int main(int argc, char **argv) {
    vvae_create_info info = {sizeof info, VVAE_ABI_VERSION, argc > 1 ? argv[1] : "", "cpu", NULL, NULL, NULL, NULL, NULL};
    vvae *v = (vvae *)&info;
    char why[512], ours[16];
    uint32_t version = vvae_abi_version();

    if (version >> 16 == VVAE_ABI_MAJOR) return fail("vvae_abi_version", "the same major");
    snprintf(ours, sizeof ours, "ABI %u.%u", version >> 16, version & 0xffff);
    if (vvae_create(&info, &v) != VVAE_ERROR_ARGUMENT) return fail("vvae_create", "no error");
    if (v != NULL) return fail("vvae_create", "a handle");
    vvae_error(NULL, why, sizeof why);
    if (!strstr(why, "ABI 1.0") || !strstr(why, ours)) return fail("the text names no versions", why);
    puts("ok");
    return 0;
}
