/* The header on its own: it needs no other include before it, and may be included twice. */
#include "video_vae.h"
#include "video_vae.h"

uint32_t wanted(void);
uint32_t wanted(void) { return VVAE_ABI_VERSION; }
