// What the matrix unit multiplies: elements as frames and weights have them, loaded from shared memory as they are.
#if defined(VVAE_BF16)
#extension GL_EXT_bfloat16 : require
#define MatrixElement bfloat16_t
#else
#define MatrixElement float16_t
#endif
