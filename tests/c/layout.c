/* Sizes and offsets as C sees them, against layout.inc, which the test writes from what Rust sees. */
#include <stddef.h>
#include <stdio.h>

#include "video_vae.h"

/* DLPack's DLTensor, as its dlpack.h declares it. */
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

static int failures = 0;

static void same(const char *what, size_t c, size_t other) {
    if (c != other) {
        printf("%s: %lu in C, but %lu there\n", what, (unsigned long)c, (unsigned long)other);
        failures++;
    }
}

#define SIZE(type, bytes) same("sizeof " #type, sizeof(type), bytes);
#define FIELD(type, field, offset, bytes) \
    same("offset of " #type "." #field, offsetof(type, field), offset); \
    same("size of " #type "." #field, sizeof(((type *)0)->field), bytes);
#define CONSTANT(name, value) same(#name, (size_t)(name), (size_t)(value));
#define AS_DLPACK(ours, theirs) \
    same("DLTensor " #theirs, offsetof(vvae_tensor, ours), offsetof(DLTensor, theirs));

int main(void) {
#include "layout.inc"
    same("sizeof DLTensor", sizeof(vvae_tensor), sizeof(DLTensor));
    AS_DLPACK(data, data)
    AS_DLPACK(device_type, device.device_type)
    AS_DLPACK(device_id, device.device_id)
    AS_DLPACK(ndim, ndim)
    AS_DLPACK(dtype, dtype)
    AS_DLPACK(shape, shape)
    AS_DLPACK(strides, strides)
    AS_DLPACK(byte_offset, byte_offset)
    return failures != 0;
}
