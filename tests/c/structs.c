/* Every struct in exactly its size: the library reads and writes no byte beyond. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "video_vae.h"

static int failures = 0;

static void expect(int good, const char *what) {
    if (good) return;
    printf("%s\n", what);
    failures++;
}

/* A struct in the middle of memory that must not change. */
enum { GUARD = 512 };
static unsigned char memory[GUARD + 1024 + GUARD];

static void *place(size_t bytes) {
    memset(memory, 0xa5, sizeof memory);
    memset(memory + GUARD, 0, bytes);
    *(uint32_t *)(void *)(memory + GUARD) = (uint32_t)bytes;
    return memory + GUARD;
}

static void intact(size_t bytes, const char *what) {
    size_t i;
    for (i = 0; i < sizeof memory; i++) {
        if ((i < GUARD || i >= GUARD + bytes) && memory[i] != 0xa5) {
            expect(0, what);
            return;
        }
    }
    expect(*(uint32_t *)(void *)(memory + GUARD) == bytes, "struct_size has changed");
}

#define FILLED(type, call)                                  \
    do {                                                    \
        type *out = place(sizeof(type));                    \
        expect((call) == VVAE_OK, #call);                   \
        intact(sizeof(type), #call " writes elsewhere");    \
    } while (0)

int main(int argc, char **argv) {
    int64_t shape[5] = {1, 16, 2, 2, 2};
    vvae_create_info *info = place(sizeof *info);
    vvae *v = NULL;
    char text[64];
    uint32_t node, i;

    expect(vvae_abi_version() >> 16 == VVAE_ABI_MAJOR, "another major");
    info->abi_version = VVAE_ABI_VERSION;
    info->weights = argc > 1 ? argv[1] : "";
    info->device = "cpu";
    expect(vvae_create(info, &v) == VVAE_OK, "create");
    intact(sizeof *info, "create writes to its arguments");

    FILLED(vvae_model_desc, vvae_model_info(v, out));
    FILLED(vvae_memory_info, vvae_memory(v, out));
    FILLED(vvae_handle_device_info, vvae_handle_device(v, 0, out));
    FILLED(vvae_plan_info, vvae_plan(v, "decode", shape, out, text, sizeof text));
    for (i = 0; i < vvae_device_count(); i++) FILLED(vvae_device_desc, vvae_device_info(i, out));
    for (node = 0; node < vvae_node_count(); node++) {
        FILLED(vvae_node_desc, vvae_node_info(node, out));
        for (i = 0; i < vvae_port_count(node); i++) FILLED(vvae_port_desc, vvae_port_info(node, i, out));
        for (i = 0; i < vvae_param_count(node); i++) FILLED(vvae_param_desc, vvae_param_info(node, i, out));
    }
    expect(vvae_free(v) == VVAE_OK, "free");
    if (failures == 0) puts("ok");
    return failures != 0;
}
