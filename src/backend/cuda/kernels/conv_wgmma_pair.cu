// Pairs of frames on compute capability 9.0a: conv_wgmma_pair_up is for the window Up, conv_wgmma_pair for the window
// Same, conv_wgmma_pair_96 likewise for tiles of 96 output channels.
#include "convolve_pairs.cuh"

extern "C" __global__ void __maxnreg__(REGISTERS) __cluster_dims__(PAIR_CLUSTER)
    conv_wgmma_pair(const __grid_constant__ ConvParams p) {
    convolve_pairs<Wide, SAME_FRAMES>(p);
}

extern "C" __global__ void __maxnreg__(REGISTERS) __cluster_dims__(PAIR_CLUSTER)
    conv_wgmma_pair_up(const __grid_constant__ ConvParams p) {
    convolve_pairs<Wide, UP_FRAMES>(p);
}

extern "C" __global__ void __maxnreg__(REGISTERS) __cluster_dims__(PAIR_CLUSTER)
    conv_wgmma_pair_96(const __grid_constant__ ConvParams p) {
    convolve_pairs<Narrow, SAME_FRAMES>(p);
}
