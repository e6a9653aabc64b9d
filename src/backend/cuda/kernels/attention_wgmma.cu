// Attention with one wide head (up to 512 channels) over all pixels of a frame, for compute capability 9.0a.
//
// A block computes 64 queries, 128 keys at a time; blocks of a cluster share their loads of keys and values.
// Warpgroup 0 loads. Warpgroup 1 multiplies queries and keys and turns the scores into probabilities. Warpgroups 2 and
// 3 multiply probabilities and values, for 256 channels each.
#include "attention.cuh"
#include "hopper.cuh"

constexpr int THREADS = 512;
constexpr int QUERIES = 64;
constexpr int KEYS = 128;        // of a step
constexpr int BOX_CHANNELS = 64;  // a box of the tensor map is a matrix of 128-byte rows
constexpr int BOX_PIXELS = 32;
constexpr int CLUSTER = 2;
constexpr int SHARED_BYTES = 231936;
constexpr int KEY_STAGES = 4;    // of 128 keys by 64 channels
constexpr int VALUE_STAGES = 2;  // of 32 values by 256 channels, for each of the two warpgroups
// Products of queries and keys, in blocks of 64 channels, before the values of the step before are added. If these came
// last, nothing would be multiplied while the scores become probabilities.
constexpr int BLOCKS_AHEAD = 8;

constexpr int ROW_BYTES = 128;
constexpr int BOX_BYTES = BOX_PIXELS * ROW_BYTES;
constexpr int BLOCKS = MAX_CHANNELS / BOX_CHANNELS;
constexpr int QUERY_BLOCK_BYTES = QUERIES * ROW_BYTES;
constexpr int KEY_BLOCK_BYTES = KEYS * ROW_BYTES;
constexpr int HALF_BLOCKS = BLOCKS / 2;
constexpr int VALUE_BLOCK_BYTES = HALF_BLOCKS * BOX_BYTES;
constexpr int REGISTERS = 128, PRODUCER_REGISTERS = 24, SCORE_REGISTERS = 152, VALUE_REGISTERS = 168;
static_assert(PRODUCER_REGISTERS + SCORE_REGISTERS + 2 * VALUE_REGISTERS <= 4 * REGISTERS,
              "setmaxnreg.inc would wait for registers forever");

struct Shared {
    u8 queries[BLOCKS][QUERY_BLOCK_BYTES];
    u8 keys[KEY_STAGES][KEY_BLOCK_BYTES];
    u8 values[2][VALUE_STAGES][VALUE_BLOCK_BYTES];
    u8 probabilities[2][KEYS / BOX_CHANNELS][QUERIES * ROW_BYTES];
    float rescale[2][QUERIES];  // of what was summed with the previous maximum
    int rescaled[2][4];         // whether a warp's queries have a `rescale` other than 1
    float sum[QUERIES];         // of a query's probabilities
    // Those who multiply wait for `full`, those who fill for `empty`.
    u64 queries_full, keys_full[KEY_STAGES], keys_empty[KEY_STAGES];
    u64 values_full[2][VALUE_STAGES], values_empty[2][VALUE_STAGES];
    u64 probabilities_full[2], probabilities_empty[2];
};
static_assert(sizeof(Shared) + 1023 < SHARED_BYTES, "dynamic shared memory of a launch, with alignment");

enum Part { QUERY, KEY, VALUE };

/// Divides the loads of what all blocks of the cluster need among them.
struct Producer {
    const AttentionParams& p;
    Shared& shared;
    int slot, steps;
    u32 rank;

    __device__ __forceinline__ void load(u32 to, int block, Part part, int pixel, u32 full) const {
        if (CLUSTER == 1)
            tma_load_4d(to, &p.map, block * BOX_CHANNELS, part, pixel, slot, full);
        else
            tma_load_4d_multicast(to, &p.map, block * BOX_CHANNELS, part, pixel, slot, full, (1 << CLUSTER) - 1);
    }

    __device__ __forceinline__ void queries_and_keys(int first_query) const {
        const int blocks = (p.channels + BOX_CHANNELS - 1) / BOX_CHANNELS;
        const u32 queries_full = smem_address(&shared.queries_full);
        mbarrier_arrive_expect_tx(queries_full, blocks * QUERY_BLOCK_BYTES);
#pragma unroll 1
        for (int block = 0; block < blocks; ++block)
            for (int i = 0; i < QUERIES / BOX_PIXELS; ++i)
                tma_load_4d(smem_address(shared.queries[block] + i * BOX_BYTES), &p.map, block * BOX_CHANNELS, QUERY,
                            first_query + i * BOX_PIXELS, slot, queries_full);
        PipelineState<KEY_STAGES> pipe;
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) {
                mbarrier_wait(smem_address(&shared.keys_empty[pipe.stage]), pipe.parity ^ 1);
                const u32 full = smem_address(&shared.keys_full[pipe.stage]);
                mbarrier_arrive_expect_tx(full, KEY_BLOCK_BYTES);
                constexpr int BOXES = KEYS / BOX_PIXELS / CLUSTER;
                for (int i = 0; i < BOXES; ++i) {
                    const int box = rank * BOXES + i;
                    load(smem_address(shared.keys[pipe.stage]) + box * BOX_BYTES, block, KEY,
                         step * KEYS + box * BOX_PIXELS, full);
                }
                pipe.advance();
            }
    }

    __device__ __forceinline__ void values() const {
        PipelineState<VALUE_STAGES> pipe;
#pragma unroll 1
        for (int first = 0; first < steps * KEYS; first += BOX_PIXELS) {
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                mbarrier_wait(smem_address(&shared.values_empty[half][pipe.stage]), pipe.parity ^ 1);
                const u32 full = smem_address(&shared.values_full[half][pipe.stage]);
                mbarrier_arrive_expect_tx(full, VALUE_BLOCK_BYTES);
                constexpr int BOXES = HALF_BLOCKS / CLUSTER;
                for (int i = 0; i < BOXES; ++i) {
                    const int box = rank * BOXES + i;
                    load(smem_address(shared.values[half][pipe.stage]) + box * BOX_BYTES, half * HALF_BLOCKS + box,
                         VALUE, first, full);
                }
            }
            pipe.advance();
        }
    }
};

/// Tells the producers of all blocks of the cluster that this warp has read a stage.
__device__ __forceinline__ void release(u64* empty, int lane) {
    if (CLUSTER == 1) {
        if (lane == 0) mbarrier_arrive(smem_address(empty));
    } else if (lane < CLUSTER) {
        mbarrier_arrive_at(smem_address(empty), lane);
    }
}

/// Warpgroup 1: scores and probabilities. A lane has two queries, lane / 4 and 8 more, and two keys of every 8.
struct Scores {
    const AttentionParams& p;
    Shared& shared;
    int warp, lane;
    PipelineState<KEY_STAGES> keys;
    PipelineState<2> pipe;
    u32 ready = 0;  // the barrier of probabilities that are there, but not yet announced
    float maximum[2] = {-INFINITE, -INFINITE}, sum[2] = {};

    __device__ __forceinline__ void announce() {
        if (ready) mbarrier_arrive(ready);
        ready = 0;
    }

    __device__ __forceinline__ void multiply(float (&s)[64]) {
        const int blocks = (p.channels + BOX_CHANNELS - 1) / BOX_CHANNELS;
        const u64 descriptor = matrix_descriptor(8 * ROW_BYTES);
        u64 a = matrix_at(descriptor, smem_address(shared.queries));
        u64* used = nullptr;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block, a += QUERY_BLOCK_BYTES / 16) {
            const u64 b = matrix_at(descriptor, smem_address(shared.keys[keys.stage]));
            mbarrier_wait(smem_address(&shared.keys_full[keys.stage]), keys.parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BOX_CHANNELS / 16; ++k) wgmma_m64n128k16(s, a + 2 * k, b + 2 * k, k || block);
            wgmma_commit();
            wgmma_wait<1>();
            if (used) release(used, lane);
            used = &shared.keys_empty[keys.stage];
            keys.advance();
            if (block == BLOCKS_AHEAD) announce();
        }
        wgmma_wait<0>();
        release(used, lane);
        announce();
    }

    /// One step of the running softmax, relative to the new maximum.
    __device__ __forceinline__ void softmax(float (&s)[64], int first_key) {
        if (first_key + KEYS > p.pixels) {
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (first_key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= p.pixels) s[i] = -INFINITE;
        }
        float base[2], rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float next = maximum[r];
#pragma unroll
            for (int i = 0; i < 32; ++i) next = fmaxf(next, s[i / 2 * 4 + 2 * r + i % 2]);
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
            rescale[r] = exp2_volatile((maximum[r] - next) * LOG2E);
            maximum[r] = next;
            base[r] = next * LOG2E;
            sum[r] *= rescale[r];
        }
        const int rescaled = __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f);
        mbarrier_wait(smem_address(&shared.probabilities_empty[pipe.stage]), pipe.parity ^ 1);
        if (lane == 0) shared.rescaled[pipe.stage][warp] = rescaled;
        const int query = 16 * warp + lane / 4;
        if (lane % 4 == 0) {
            shared.rescale[pipe.stage][query] = rescale[0];
            shared.rescale[pipe.stage][query + 8] = rescale[1];
        }
        // stmatrix: lane 8k + i has row i of matrix k; these are rows 0 and 8 of 8 keys, then of the next 8.
        const u32 row = smem_address(shared.probabilities[pipe.stage]) + (16 * warp + lane % 16) * ROW_BYTES;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = (n + i / 2) * 4 + i % 2 * 2;
                const float x = exp2_volatile(s[at] * LOG2E - base[i % 2]);
                const float y = exp2_volatile(s[at + 1] * LOG2E - base[i % 2]);
                sum[i % 2] += x + y;
                packed[i] = pack2(x, y);
            }
            stmatrix_x4(row + n / 8 * (QUERIES * ROW_BYTES) + (((n % 8 + lane / 16) ^ (lane % 8)) << 4), packed);
        }
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            if (lane % 4 == 0) shared.sum[16 * warp + lane / 4 + 8 * r] = sum[r];
        }
    }

    __device__ __forceinline__ void run(int steps) {
        mbarrier_wait(smem_address(&shared.queries_full), 0);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            float s[64];
            multiply(s);
            softmax(s, step * KEYS);
            if (step == steps - 1) finish();
            fence_async_proxy();
            ready = smem_address(&shared.probabilities_full[pipe.stage]);
            pipe.advance();
            if (BLOCKS_AHEAD == 0) announce();
        }
        announce();
    }
};

/// Warpgroups 2 and 3: outputs of one half of the channels.
struct Outputs {
    const AttentionParams& p;
    Shared& shared;
    int half, warp, lane;

    __device__ __forceinline__ void run(int steps, int first_query, int out_slot) const {
        constexpr int STEPS_OF_BOX = BOX_PIXELS / 16;
        const u64 row_major = matrix_descriptor(8 * ROW_BYTES);
        const u64 transposed = transposed_descriptor(8 * ROW_BYTES, BOX_BYTES);
        PipelineState<VALUE_STAGES> values;
        PipelineState<2> pipe;
        float out[2][64] = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            mbarrier_wait(smem_address(&shared.probabilities_full[pipe.stage]), pipe.parity);
            // The maximum rarely changes after the first few keys.
            if (shared.rescaled[pipe.stage][warp]) {
                const float* rescale = shared.rescale[pipe.stage] + 16 * warp + lane / 4;
                const float by[2] = {rescale[0], rescale[8]};
#pragma unroll
                for (int i = 0; i < 128; ++i) out[i / 64][i % 64] *= by[i / 2 % 2];
            }
            const u64 a = matrix_at(row_major, smem_address(shared.probabilities[pipe.stage]));
            u64* used = nullptr;
#pragma unroll
            for (int box = 0; box < KEYS / BOX_PIXELS; ++box) {
                const u64 b = matrix_at(transposed, smem_address(shared.values[half][values.stage]));
                mbarrier_wait(smem_address(&shared.values_full[half][values.stage]), values.parity);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < STEPS_OF_BOX; ++k) {
                    const int key = box * BOX_PIXELS + 16 * k;
                    const u64 p = a + (key / BOX_CHANNELS * QUERIES * ROW_BYTES + key % BOX_CHANNELS * 2) / 16;
                    wgmma_m64n128k16<1>(out[0], p, b + k * ROW_BYTES, 1);
                    wgmma_m64n128k16<1>(out[1], p, b + k * ROW_BYTES + 2 * BOX_BYTES / 16, 1);
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (used) release(used, lane);
                used = &shared.values_empty[half][values.stage];
                values.advance();
            }
            wgmma_wait<0>();
            release(used, lane);
            mbarrier_arrive(smem_address(&shared.probabilities_empty[pipe.stage]));
            pipe.advance();
        }
        store(out, first_query, out_slot);
    }

    /// Divides by the sum of the probabilities, rounds and stores.
    __device__ __forceinline__ void store(const float (&out)[2][64], int first_query, int out_slot) const {
        u8* to = p.out + out_slot * p.out_slot_bytes;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = 16 * warp + lane / 4 + 8 * r, pixel = first_query + query;
            if (pixel >= p.pixels) continue;
            const float scale = 1.0f / shared.sum[query];
#pragma unroll
            for (int n = 0; n < 32; ++n) {
                const int channel = half * (MAX_CHANNELS / 2) + n * 8 + lane % 4 * 2;
                if (channel < p.channels)
                    *reinterpret_cast<Pair*>(to + (static_cast<i64>(pixel) * p.channels + channel) * ELEMENT_BYTES) =
                        pack2(out[n / 16][n % 16 * 4 + 2 * r] * scale, out[n / 16][n % 16 * 4 + 2 * r + 1] * scale);
            }
        }
    }
};

__device__ __forceinline__ void init_barriers(Shared& shared) {
    mbarrier_init(smem_address(&shared.queries_full), 1);
    for (int i = 0; i < KEY_STAGES; ++i) {
        mbarrier_init(smem_address(&shared.keys_full[i]), 1);
        mbarrier_init(smem_address(&shared.keys_empty[i]), 4 * CLUSTER);
    }
    for (int i = 0; i < 2 * VALUE_STAGES; ++i) {
        mbarrier_init(smem_address(&shared.values_full[0][i]), 1);
        mbarrier_init(smem_address(&shared.values_empty[0][i]), 4 * CLUSTER);
    }
    for (int i = 0; i < 2; ++i) {
        // Every thread arrives for what it wrote or read by plain instructions.
        mbarrier_init(smem_address(&shared.probabilities_full[i]), 128);
        mbarrier_init(smem_address(&shared.probabilities_empty[i]), 256);
    }
    fence_mbarrier_init();
    fence_async_proxy();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __maxnreg__(REGISTERS)
    attention_wgmma(const __grid_constant__ AttentionParams p) {
    extern __shared__ u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-smem_address(memory) & 1023));
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first_query = p.first_query + blockIdx.x * QUERIES, frame = blockIdx.y;
    const int steps = (p.pixels + KEYS - 1) / KEYS;
    if (threadIdx.x == 0) init_barriers(shared);
    cluster_sync();
    begin_launch();
    if (group == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const Producer producer = {p, shared, p.in_slot[frame], steps, cluster_rank()};
        if (threadIdx.x == 0) producer.queries_and_keys(first_query);
        if (threadIdx.x == 32) producer.values();
    } else if (group == 1) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        Scores scores = {p, shared, warp, lane};
        scores.run(steps);
    } else {
        warpgroup_reg_alloc<VALUE_REGISTERS>();
        const Outputs outputs = {p, shared, group - 2, warp, lane};
        outputs.run(steps, first_query, p.out_slot[frame]);
    }
    cluster_sync();  // the other block may still load into this one's memory, or arrive at its barriers
}
