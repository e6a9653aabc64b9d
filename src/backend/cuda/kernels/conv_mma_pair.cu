// Pairs of output frames by Winograd F(2,3) in time, for compute capability 8.0 and later. See mainloop_mma.cuh.
//
//     m0 = U0 (d0 - d2)    m1 = U1 (d1 + d2)    m2 = U2 (d2 - d1)    m3 = U3 (d1 - d3)
//     first frame = m0 + m1 + m2        second frame = m1 - m2 - m3
//
// d0 to d3 are the input frames of both, U0 to U3 sums of the weights' slabs. A tile is 8 x 16 pixels of both frames by
// 128 output channels. Warps 0 to 3 sum m1, warps 4 to 7 m2. Then they exchange their sums, and each group has the sum
// of one frame, to which it adds m0 or -m3. So each frame's sum has the same products in the same order if the other
// frame is missing.
//
// A group loads a step of channels of two patches. Each thread adds or subtracts the units that it has loaded. Groups
// wait for each other in the exchange only, so one multiplies while the other loads. Blocks are persistent: the next
// tile's first patches arrive before the epilogue. `p.frames` counts pairs.
#include "epilogue_mma.cuh"
#include "mainloop_mma.cuh"

constexpr int THREADS = 256;
constexpr int GROUP_THREADS = 128;
constexpr int PATCH_BYTES = PATCH_PIXELS * STEP_BYTES;
constexpr int STEP_UNITS = STEP_BYTES / UNIT_BYTES;
constexpr int TAPS = 9;
constexpr int EXCHANGED = 8;  // sums that a thread exchanges at once
constexpr int SHARED_BYTES = 87040;

// Taps during which a group loads and transforms its next patches.
constexpr int LOAD_TAP = 1, TRANSFORM_TAP = 6;

/// What the products of a step add: to m1 or m2, to one frame, or the shortcut to one frame.
enum Sum { SHARED, OWN, SHORTCUT_SUM, SUMS };

struct GroupShared {
    u8 patch[2][PATCH_BYTES];  // [stage]
    u8 other[PATCH_BYTES];     // what is added or subtracted
    // [parity of the tile]: slower warps still read those of the tile before. [sum][first operand, second operand]
    PatchSource source[2][SUMS][2];
};

struct PairShared {
    GroupShared group[2];
    float4 exchange[2][EXCHANGED / 4][THREADS];
    WarpMoments<WARP_CHANNELS / 4> moments[THREADS / 32];
};
static_assert(sizeof(PairShared) == SHARED_BYTES, "dynamic shared memory of a launch");

/// Goes through the steps of a group's tiles.
struct StepCursor {
    const ConvParams& p;
    int group;
    int index;
    int parity = 0;  // of the tile
    Tile tile;
    FramePair pair;
    int sum;
    int step;
    const u8* weights;  // of the step's first tap

    __device__ __forceinline__ StepCursor(const ConvParams& p, int group) : p(p), group(group), index(blockIdx.x) {
        enter_tile();
    }

    __device__ __forceinline__ bool done() const { return index >= Tile::count(p); }
    __device__ __forceinline__ int steps() const { return p.source[sum == SHORTCUT_SUM].k_blocks * STEPS; }

    __device__ __forceinline__ void enter_tile() {
        tile = Tile(p, index, TILE_ROWS, TILE_COLS);
        pair = FramePair(p, tile);
        enter_sum(SHARED);
    }

    __device__ __forceinline__ void enter_sum(int next) {
        sum = next, step = 0;
        if (sum == SHORTCUT_SUM) {
            weights = weight_tiles(p, p.source[1], true, 0, tile);
            return;
        }
        // Two slabs lie side by side, a step's tile of each in turn.
        const i64 first = (sum == OWN ? p.channel_tiles : 0) + tile.channel_tile;
        weights = p.source[0].weights + first * p.source[0].k_blocks * TAPS * (2 * WEIGHT_TILE_BYTES) +
                  group * STEP_TILE_BYTES;
    }

    /// True if a tile ends.
    __device__ __forceinline__ bool advance() {
        weights += sum == SHORTCUT_SUM ? STEP_TILE_BYTES : TAPS * WEIGHT_TILE_BYTES;
        if (++step < steps()) return false;
        const bool has_own = pair.has(group);
        if (has_own && (sum == SHARED || (sum == OWN && pair.frame[group].slot[SHORTCUT_TERM] >= 0))) {
            enter_sum(sum + 1);
            return false;
        }
        index += gridDim.x;
        parity ^= 1;
        if (!done()) enter_tile();
        else weights = p.source[0].weights;  // there is one load too many
        return true;
    }

    /// For the first threads of the group, once a tile is entered and before a barrier of the group.
    __device__ __forceinline__ void store_sources(GroupShared& shared, int thread) const {
        if (done() || thread >= 2 * SUMS) return;
        const int sum = thread / 2, second = thread % 2;
        const FrameParams& frame = sum == SHARED ? pair.any() : pair.frame[group];
        if (frame.terms == 0 || (sum == SHORTCUT_SUM && (second || frame.slot[SHORTCUT_TERM] < 0))) return;
        // d1 + d2, d2 - d1; then the frame's first term less its last.
        const int term = sum == SHORTCUT_SUM ? SHORTCUT_TERM : sum == OWN ? 2 * second : pair.has(0) + (second ^ group);
        const Source& source = p.source[sum == SHORTCUT_SUM];
        const InputFrame input = input_frame(p, frame, term, tile);
        shared.source[parity][sum][second] = PatchSource(source, source.plane[0], p.part[input.part], input.slot, tile);
    }
};

/// Loads and transforms this thread's units of the patches of a step.
struct PatchLoader {
    const ConvParams& p;
    GroupShared& shared;
    UnitWalk<GROUP_THREADS, STEP_UNITS> units;

    __device__ __forceinline__ void load(const StepCursor& at, int stage) const {
        if (!at.done()) {
            const Source& source = p.source[at.sum == SHORTCUT_SUM];
            const PatchSource(&from)[2] = shared.source[at.parity][at.sum];
            units.load(source, from[0], at.step * STEP_CHANNELS, smem_address(shared.patch[stage]));
            if (at.sum != SHORTCUT_SUM)
                units.load(source, from[1], at.step * STEP_CHANNELS, smem_address(shared.other));
        }
        cp_async_commit();
    }

    /// Waits for what this thread has loaded, and transforms it in place.
    __device__ __forceinline__ void transform(const StepCursor& at, int stage) const {
        cp_async_wait<0>();
        if (at.done() || at.sum == SHORTCUT_SUM) return;
        const bool adds = at.sum == SHARED && at.group == 0;
        units.for_each([&](int place) {
            uint4& x = *reinterpret_cast<uint4*>(shared.patch[stage] + place);
            const uint4 y = *reinterpret_cast<const uint4*>(shared.other + place);
            x = adds ? zip(x, y, add2) : zip(x, y, subtract2);
        });
    }
};

/// The first group gets the sum of both groups' sums, the second the difference.
__device__ __forceinline__ void exchange_sums(PairShared& shared, int group, int warp,
                                              float (&acc)[TILE_ROWS][CHANNEL_BLOCKS][4]) {
    const int other = threadIdx.x ^ GROUP_THREADS;
    const auto at = [&](int i) -> float(&)[4] { return acc[i / CHANNEL_BLOCKS][i % CHANNEL_BLOCKS]; };
#pragma unroll
    for (int i = 0; i < TILE_ROWS * CHANNEL_BLOCKS; i += EXCHANGED / 4) {
        float4(&buffer)[EXCHANGED / 4][THREADS] = shared.exchange[i / (EXCHANGED / 4) % 2];
#pragma unroll
        for (int j = 0; j < EXCHANGED / 4; ++j) {
            const float(&own)[4] = at(i + j);
            buffer[j][threadIdx.x] = make_float4(own[0], own[1], own[2], own[3]);
        }
        named_barrier(3 + warp % CHANNEL_WARPS, 64);
#pragma unroll
        for (int j = 0; j < EXCHANGED / 4; ++j) {
            const float4 got = buffer[j][other];
            float(&own)[4] = at(i + j);
            own[0] = group ? got.x - own[0] : own[0] + got.x;
            own[1] = group ? got.y - own[1] : own[1] + got.y;
            own[2] = group ? got.z - own[2] : own[2] + got.z;
            own[3] = group ? got.w - own[3] : own[3] + got.w;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_mma_pair(const __grid_constant__ ConvParams p) {
    extern __shared__ __align__(128) u8 memory[];
    PairShared& shared = *reinterpret_cast<PairShared*>(memory);
    // The shuffle tells the compiler that a warp's numbers are the same in all its lanes.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / CHANNEL_WARPS;
    const int warp_channel = warp % CHANNEL_WARPS * WARP_CHANNELS;
    const int a_col = lane & 15, a_unit = lane >> 4;
    const int b_lane = lane_weights(warp_channel, lane);
    GroupShared& own = shared.group[group];
    const int thread = threadIdx.x % GROUP_THREADS;
    const PatchLoader loader = {p, own, UnitWalk<GROUP_THREADS, STEP_UNITS>(thread)};
    const auto group_barrier = [&] { named_barrier(1 + group, GROUP_THREADS); };

    StepCursor next(p, group);
    next.store_sources(own, thread);
    group_barrier();
    loader.load(next, 0);
    loader.transform(next, 0);
    int stage = 0;
    float acc[TILE_ROWS][CHANNEL_BLOCKS][4];
    while (!next.done()) {
        // Derived again, so that the epilogue before has the registers.
        next.enter_tile();
        int index = next.index;
        const bool has_frame = next.pair.has(group);
        StepWeights weights;
        weights.load(next.weights + b_lane);
        // m1 is in both frames' sums, so it starts from the bias.
        const float* bias = bias_of(p, next.pair.any(), next.tile, 0) + next.tile.channel_tile * TILE_CHANNELS;
#pragma unroll
        for (int n = 0; n < CHANNEL_BLOCKS; ++n) {
            float2 v = make_float2(0.0f, 0.0f);
            if (group == 0) v = load_pair_readonly(bias + warp_channel + 8 * n + 2 * (lane & 3));
#pragma unroll
            for (int m = 0; m < TILE_ROWS; ++m) acc[m][n][0] = acc[m][n][2] = v.x, acc[m][n][1] = acc[m][n][3] = v.y;
        }
        bool end = false;
#pragma unroll 1
        while (!end) {
            const int sum = next.sum;
            const u8* tap_weights = next.weights + b_lane;
            end = next.advance();
            if (end) next.store_sources(own, thread);
            const bool last_shared = sum == SHARED && (end || next.sum == OWN);
            group_barrier();
            u32 pixel = smem_address(own.patch[stage]) + a_col * STEP_BYTES;
            const auto add_tap = [&](int col) {
                StepWeights following;
                following.load(tap_weights);
                const u32 a = pixel + col * STEP_BYTES + ((a_unit ^ (((a_col + col) >> 1) & 3)) << 4);
                add_step<STEP_BYTES>(a, a ^ 32, weights, acc);
                weights = following;
            };
            if (sum == SHORTCUT_SUM) {
                loader.load(next, stage ^ 1);
                tap_weights = next.weights + b_lane;
                add_tap(0);
                loader.transform(next, stage ^ 1);
            } else {
#pragma unroll 1
                for (int tap = 0, col = 0; tap < TAPS; ++tap) {
                    if (tap == LOAD_TAP) loader.load(next, stage ^ 1);
                    if (tap == TRANSFORM_TAP) loader.transform(next, stage ^ 1);
                    tap_weights = tap + 1 < TAPS ? tap_weights + WEIGHT_TILE_BYTES : next.weights + b_lane;
                    add_tap(col);
                    if (++col == 3) {
                        col = 0;
                        pixel += PATCH_PITCH * STEP_BYTES;
                    }
                }
            }
            stage ^= 1;
            if (last_shared) exchange_sums(shared, group, warp, acc);
        }
        if (!has_frame) continue;
        // Hides where both come from. Else the compiler would keep what it derived from them.
        asm volatile("" : "+r"(index), "+r"(next.index));
        const Tile tile(p, index, TILE_ROWS, TILE_COLS);
        const FrameParams& frame = p.frame[2 * tile.frame + group];
        const int2 first_pixel = make_int2(tile.x + lane / 4, tile.y);
        const EpilogueMma<2 * TILE_ROWS, 1> epilogue = {
            p, tile, frame, lane, first_pixel, tile.channel_tile * TILE_CHANNELS + warp_channel};
        const auto value = [&](int i, int block, int e) -> float& { return acc[i / 2][block][2 * (i % 2) + e]; };
        auto& moments = shared.moments[warp];
        epilogue.store(value, p.records ? &moments : nullptr);
        if (p.records) {
            __syncwarp();
            if (lane < WARP_CHANNELS / 4)
                store_record<1, TILE_ROWS>(p, tile, frame.record, &moments, lane, tile.x, tile.y,
                                           tile.channel_tile * TILE_CHANNELS + warp_channel);
            __syncwarp();
        }
    }
}
