/* A C program that links the library: encode, stream the latents back to video, and compare with decode. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "video_vae.h"

enum { FRAMES = 5, SIDE = 16, LATENTS = 2, LATENT_SIDE = 2, CHANNELS = 16, PIXELS = FRAMES * SIDE * SIDE * 3 };

static int fail(vvae *v, const char *what) {
    char why[512];
    vvae_error(v, why, sizeof why);
    printf("%s: %s\n", what, why);
    return 1;
}

static int32_t count(void *user, uint64_t done, uint64_t total, const char *stage) {
    (void)done, (void)total, (void)stage;
    ++*(int *)user;
    return 0;
}

int main(int argc, char **argv) {
    static uint8_t rgb[PIXELS], whole[PIXELS], pieces[PIXELS];
    static float latent[CHANNELS * LATENTS * LATENT_SIDE * LATENT_SIDE];
    int64_t video_shape[5] = {1, 3, FRAMES, SIDE, SIDE};
    int64_t strides[5] = {PIXELS, 1, SIDE * SIDE * 3, SIDE * 3, 3};
    int64_t latent_shape[5] = {1, CHANNELS, LATENTS, LATENT_SIDE, LATENT_SIDE};
    vvae_tensor video = {rgb, VVAE_DEVICE_CPU, 0, 5, VVAE_DTYPE_U8, video_shape, strides, 0};
    vvae_tensor latents = {latent, VVAE_DEVICE_CPU, 0, 5, VVAE_DTYPE_F32, latent_shape, NULL, 0};
    vvae_create_info info = {sizeof info, VVAE_ABI_VERSION, argc > 1 ? argv[1] : "", "cpu", NULL, NULL, NULL, NULL, NULL};
    vvae_run_info run = {sizeof run, 0, NULL, count, NULL, NULL};
    vvae *v = NULL;
    vvae_stream *s = NULL;
    int64_t taken = 0, written = 0, done = 0;
    int told = 0, i;
    int32_t status;

    if (vvae_abi_version() >> 16 != VVAE_ABI_MAJOR) return fail(NULL, "another ABI");
    for (i = 0; i < PIXELS; i++) rgb[i] = (uint8_t)(i * 7 + i / 50);
    if (vvae_create(&info, &v) != VVAE_OK) return fail(NULL, "create");
    if (vvae_configure(v, "threads", "2") != VVAE_OK) return fail(v, "configure");
    run.progress_user = &told;
    if (vvae_encode(v, &video, &latents, &run) != VVAE_OK) return fail(v, "encode");
    if (told == 0) return fail(NULL, "no progress");
    video.data = whole;
    if (vvae_decode(v, &latents, &video, NULL) != VVAE_OK) return fail(v, "decode");

    if (vvae_stream_open(v, "decode", latent_shape, &s) != VVAE_OK) return fail(v, "stream open");
    video_shape[2] = 1; /* one frame at a time out, one latent frame at a time in */
    latent_shape[2] = 1;
    {
        int64_t latent_strides[5] = {0, LATENTS * LATENT_SIDE * LATENT_SIDE, LATENT_SIDE * LATENT_SIDE, LATENT_SIDE, 1};
        int64_t next = 0;
        latents.strides = latent_strides;
        do {
            if (next < LATENTS) {
                latents.byte_offset = (uint64_t)(next * LATENT_SIDE * LATENT_SIDE) * sizeof(float);
                status = vvae_stream_push(s, &latents, &taken);
                next += taken;
            } else {
                status = vvae_stream_push(s, NULL, NULL);
            }
            while (status >= 0) {
                video.data = pieces + (done < FRAMES ? done : 0) * SIDE * SIDE * 3;
                status = vvae_stream_pull(s, &video, NULL, &written);
                if (status != VVAE_OK) break;
                done += written;
            }
        } while (status == VVAE_AGAIN);
    }
    if (status != VVAE_END) return fail(v, "stream");
    if (done != FRAMES || memcmp(whole, pieces, PIXELS) != 0) return fail(NULL, "the stream's frames differ");
    if (vvae_stream_close(s) != VVAE_OK) return fail(v, "stream close");
    if (vvae_free(v) != VVAE_OK) return fail(NULL, "free");
    if (vvae_free(v) != VVAE_ERROR_STATE) return fail(NULL, "freed twice");
    puts("ok");
    return 0;
}
