// conv_out with the norm of pixels.
#define VVAE_PIXEL_NORM
#include "conv_out.cu"
