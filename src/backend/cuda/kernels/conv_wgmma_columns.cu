// Pairs of columns on compute capability 9.0a, for the window Same.
#include "convolve_pairs.cuh"

extern "C" __global__ void __maxnreg__(REGISTERS) __cluster_dims__(PAIR_CLUSTER)
    conv_wgmma_columns(const __grid_constant__ ConvParams p) {
    convolve_pairs<Wide, COLUMN_PAIRS>(p);
}
