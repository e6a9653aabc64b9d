/* A host that was built with the header of ABI 2.0. Every later 2.x runs it: with this header's structs, nothing is
   written beyond them, and ranges and resumed streams have the bits of the whole clip. */
#include <stdio.h>
#include <string.h>

#include "video_vae.h"

#if VVAE_ABI_VERSION != (2 << 16)
#error "this needs the header of ABI 2.0"
#endif

enum { FRAMES = 9, SIDE = 16, LATENTS = 3, LATENT_SIDE = 2, CHANNELS = 16, IMAGE = SIDE * SIDE * 3 };
enum { LATENT = LATENT_SIDE * LATENT_SIDE, RANGE = 5, RESUMED = 5, GUARD = 64 };

static int fail(vvae *v, const char *what) {
    char why[512];
    vvae_error(v, why, sizeof why);
    printf("%s: %s\n", what, why);
    return 1;
}

/* A struct that the library writes, and what lies behind it in an old host. */
#define GUARDED(type) struct { type value; unsigned char guard[GUARD]; }
#define FILL(guarded) (memset(&(guarded), 0x5a, sizeof(guarded)), (guarded).value.struct_size = sizeof((guarded).value))

static int intact(const unsigned char *guard) {
    int i;
    for (i = 0; i < GUARD; i++) if (guard[i] != 0x5a) return 0;
    return 1;
}

static int tells_of(vvae *v, const int64_t *video) {
    GUARDED(vvae_model_desc) model;
    GUARDED(vvae_plan_info) plan;
    GUARDED(vvae_memory_info) memory;
    GUARDED(vvae_handle_device_info) device;
    char text[4096];
    FILL(model);
    FILL(plan);
    FILL(memory);
    FILL(device);
    if (vvae_model_info(v, &model.value) != VVAE_OK || !intact(model.guard)) return fail(v, "model info");
    if (model.value.latent_channels != CHANNELS || model.value.spatial_scale != SIDE / LATENT_SIDE)
        return fail(NULL, "another model");
    if (vvae_plan(v, "encode", video, &plan.value, text, sizeof text) != VVAE_OK || !intact(plan.guard))
        return fail(v, "plan");
    if (plan.value.output_shape[2] != LATENTS || plan.value.exact != 1) return fail(NULL, "another plan");
    if (vvae_memory(v, &memory.value) != VVAE_OK || !intact(memory.guard)) return fail(v, "memory");
    if (vvae_handle_device(v, 0, &device.value) != VVAE_OK || !intact(device.guard)) return fail(v, "device");
    return strcmp(device.value.id, "cpu") == 0 ? 0 : fail(NULL, "another device");
}

static int tells_of_the_run(vvae *v) {
    GUARDED(vvae_run_report) report;
    char text[4096];
    FILL(report);
    if (vvae_last_run(v, &report.value, text, sizeof text) != VVAE_OK || !intact(report.guard))
        return fail(v, "last run");
    return strcmp(report.value.node, "decode") == 0 ? 0 : fail(NULL, "another run");
}

/* Every node, port and parameter. */
static int discovers(void) {
    uint32_t node, i;
    for (node = 0; node < vvae_node_count(); node++) {
        GUARDED(vvae_node_desc) desc;
        FILL(desc);
        if (vvae_node_info(node, &desc.value) != VVAE_OK || !intact(desc.guard)) return fail(NULL, "node");
        for (i = 0; i < vvae_port_count(node); i++) {
            GUARDED(vvae_port_desc) port;
            FILL(port);
            if (vvae_port_info(node, i, &port.value) != VVAE_OK || !intact(port.guard)) return fail(NULL, "port");
        }
        for (i = 0; i < vvae_param_count(node); i++) {
            GUARDED(vvae_param_desc) parameter;
            FILL(parameter);
            if (vvae_param_info(node, i, &parameter.value) != VVAE_OK || !intact(parameter.guard))
                return fail(NULL, "parameter");
        }
    }
    return 0;
}

/* The frames from RESUMED on, by a stream that begins there. Latents are pushed from `first` on. */
static int resumes(vvae *v, vvae_tensor latents, int64_t first, uint8_t *frames) {
    int64_t shape[5] = {1, CHANNELS, LATENTS, LATENT_SIDE, LATENT_SIDE}, one[5] = {1, 3, 1, SIDE, SIDE};
    int64_t strides[5] = {0, 1, 0, SIDE * 3, 3};
    vvae_tensor video = {frames, VVAE_DEVICE_CPU, 0, 5, VVAE_DTYPE_U8, one, strides, 0};
    vvae_stream *s = NULL;
    int64_t taken = 0, written = 0, done = RESUMED, left = LATENTS - first;
    int32_t status = VVAE_OK;
    if (vvae_stream_open_at(v, "decode", shape, RESUMED, &s) != VVAE_OK) return fail(v, "stream open");
    shape[2] = left;
    latents.shape = shape;
    latents.byte_offset = (uint64_t)first * LATENT * sizeof(float);
    do {
        if (left > 0) {
            if (vvae_stream_push(s, &latents, &taken) < 0) return fail(v, "push");
            left = shape[2] -= taken;
            latents.byte_offset += (uint64_t)taken * LATENT * sizeof(float);
        } else if (vvae_stream_push(s, NULL, NULL) < 0) {
            return fail(v, "finish");
        }
        while (done < FRAMES && (status = vvae_stream_pull(s, &video, NULL, &written)) == VVAE_OK) {
            video.byte_offset += (uint64_t)written * IMAGE;
            done += written;
        }
    } while (status == VVAE_AGAIN);
    if (status < 0) return fail(v, "pull");
    if (done != FRAMES) return fail(NULL, "frames are missing");
    return vvae_stream_close(s) == VVAE_OK ? 0 : fail(v, "stream close");
}

int main(int argc, char **argv) {
    static uint8_t rgb[FRAMES * IMAGE], whole[FRAMES * IMAGE], part[FRAMES * IMAGE];
    static float latent[CHANNELS * LATENTS * LATENT];
    int64_t video_shape[5] = {1, 3, FRAMES, SIDE, SIDE}, strides[5] = {0, 1, IMAGE, SIDE * 3, 3};
    int64_t latent_shape[5] = {1, CHANNELS, LATENTS, LATENT_SIDE, LATENT_SIDE};
    int64_t latent_strides[5] = {0, LATENTS * LATENT, LATENT, LATENT_SIDE, 1};
    vvae_tensor video = {rgb, VVAE_DEVICE_CPU, 0, 5, VVAE_DTYPE_U8, video_shape, strides, 0};
    vvae_tensor latents = {latent, VVAE_DEVICE_CPU, 0, 5, VVAE_DTYPE_F32, latent_shape, latent_strides, 0};
    vvae_create_info info = {.struct_size = sizeof info, .abi_version = VVAE_ABI_VERSION, .device = "cpu"};
    int64_t first = 0, count = 0;
    vvae *v = NULL;
    int i;

    if (vvae_abi_version() >> 16 != VVAE_ABI_MAJOR) return fail(NULL, "another ABI");
    info.weights = argc > 1 ? argv[1] : "";
    for (i = 0; i < FRAMES * IMAGE; i++) rgb[i] = (uint8_t)(i * 7 + i / 50);
    if (discovers()) return 1;
    if (vvae_create(&info, &v) != VVAE_OK) return fail(NULL, "create");
    if (vvae_configure(v, "threads", "2") != VVAE_OK) return fail(v, "configure");
    if (tells_of(v, video_shape)) return 1;
    if (vvae_encode(v, &video, &latents, NULL) != VVAE_OK) return fail(v, "encode");
    video.data = whole;
    if (vvae_decode(v, &latents, &video, NULL) != VVAE_OK) return fail(v, "decode");
    if (tells_of_the_run(v)) return 1;

    /* The last frames, as a range and by a stream. */
    if (vvae_range_inputs(v, "decode", LATENTS, RANGE, FRAMES - RANGE, &first, &count) != VVAE_OK)
        return fail(v, "range");
    latents.byte_offset = (uint64_t)first * LATENT * sizeof(float);
    latent_shape[2] = count;
    video.data = part;
    video_shape[2] = FRAMES - RANGE;
    if (vvae_decode_range(v, &latents, LATENTS, RANGE, &video, NULL) != VVAE_OK) return fail(v, "decode range");
    if (memcmp(part, whole + RANGE * IMAGE, (FRAMES - RANGE) * IMAGE) != 0)
        return fail(NULL, "the range's frames differ");
    if (vvae_range_inputs(v, "decode", LATENTS, RESUMED, 0, &first, &count) != VVAE_OK) return fail(v, "resume");
    memset(part, 0, sizeof part);
    if (resumes(v, latents, first, part)) return 1;
    if (memcmp(part, whole + RESUMED * IMAGE, (FRAMES - RESUMED) * IMAGE) != 0)
        return fail(NULL, "the stream's frames differ");

    if (vvae_trim(v, VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS) != VVAE_OK) return fail(v, "trim");
    if (vvae_free(v) != VVAE_OK) return fail(NULL, "free");
    if (vvae_free(v) != VVAE_ERROR_STATE) return fail(NULL, "freed twice");
    puts("ok");
    return 0;
}
