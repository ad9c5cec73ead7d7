// Tail-biting Viterbi search at any width, the half rates too: 1, 1.5, 2.5 and 3.5 bits have no faster kernel.
//
// Position p adds D(p) bits to the stream: WHOLE at even p, WHOLE + HALF at odd p. The state at p is k|out, its in-node the
// state without its last D(p) bits, its out-node the state without its first D(p + 1) bits. A block takes one tile at a
// time and keeps the costs of every step in global memory, where the next step and the walk back read them.
//
// Same arithmetic, lowering and ties as viterbi.cu, but a walk that goes link by link.
// Compile-time settings: WHOLE (1 to 8), HALF (0 or 1), THREADS.

#include "common.cuh"

constexpr int MOST_NODES = 65536 >> WHOLE;

__device__ __forceinline__ int bits_at(int p) { return WHOLE + (HALF & p); }   // HALF is one bit, p may be RING
__device__ __forceinline__ int nodes_before(int p) { return 65536 >> bits_at(p); }

// The costs after a position, from those before it.
__device__ __forceinline__ u32 relax(int p, int node, u32 target, const u16* costs) {   // for nodes node and node + 1
    const int width = bits_at(p), next = bits_at(p + 1);
    u32 best = INFINITE * 0x10001u;
    for (int k = 0; k < 1 << next; ++k) {
        u32 state = k << (16 - next) | node;   // node is even: the two states share their in-node
        u32 d = sub2(value_of(state) | value_of(state + 1) << 16, target);
        best = min2(best, fma2(d, d, twice(costs[state >> width])));
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(THREADS)
viterbi_any(const float* targets_in, float* values_out, u16* states_out, u16* history, int tiles, int columns,
            int row_stride, long long strip_stride, long long states_stride)
{
    __shared__ u16 targets[RING];
    __shared__ u32 lowest[LOWERINGS];
    __shared__ int closing;
    __shared__ u32 cheapest;
    const Layout layout{columns, row_stride, strip_stride, states_stride};
    const int thread = threadIdx.x, lane = thread % 32;
    u16* const kept = history + (size_t)blockIdx.x * (RING + 1) * MOST_NODES;   // before the first step, after each step

    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int p = thread; p < RING; p += THREADS)
            targets[p] = target_half(targets_in[layout.first_element(tile) + layout.element(p)]);
        for (int pass = 0; pass < 2; ++pass) {
            const int ring_start = pass ? 0 : HALF_RING;
            for (int i = thread; i < LOWERINGS; i += THREADS) lowest[i] = i ? LARGEST : 0;
            if (thread == 0) cheapest = ~0u;
            for (int n = thread; n < nodes_before(ring_start); n += THREADS) kept[n] = pass && n != closing ? INFINITE : 0;
            __syncthreads();
            for (int step = 0; step < RING; ++step) {
                const int p = ring_start + step & RING - 1;
                const u16* in = kept + (size_t)step * MOST_NODES;
                u32* out = reinterpret_cast<u32*>(kept + (size_t)(step + 1) * MOST_NODES);
                const u32 target = twice(targets[p]);
                const u32 by = step % LOWER == 0 ? twice(lowest[step / LOWER]) : 0;
                u32 least = LARGEST * 0x10001u;
                for (int pair = thread; pair < nodes_before(p + 1) / 2; pair += THREADS) {
                    u32 best = sub2(relax(p, 2 * pair, target, in), by);
                    out[pair] = best;
                    least = min2(least, best);
                    if (step == RING - 1 && !pass) {
                        atomicMin(&cheapest, (best & 0xffff) << 16 | 2 * pair);
                        atomicMin(&cheapest, best & 0xffff0000u | 2 * pair + 1);
                    }
                }
                if (step % LOWER == LOWER - 1) {
                    least = __reduce_min_sync(~0u, smaller_half(least));
                    if (lane == 0) atomicMin(&lowest[step / LOWER + 1], least);
                }
                __syncthreads();
            }
            if (thread < 32) {   // the walk back, by one warp
                int node = pass ? closing : cheapest & 0xffff;
                for (int step = RING - 1; step >= (pass ? 0 : HALF_RING); --step) {
                    const int p = ring_start + step & RING - 1, width = bits_at(p), next = bits_at(p + 1);
                    const u16* in = kept + (size_t)step * MOST_NODES;
                    u32 best = ~0u;
                    for (int k = lane; k < 1 << next; k += 32) {
                        u32 state = k << (16 - next) | node, d = sub2(value_of(state), targets[p]);
                        u32 cost = fma2(d, d, in[state >> width]);
                        if (step % LOWER == 0) cost = sub2(cost, lowest[step / LOWER]);
                        best = min(best, cost << 16 | k);
                    }
                    u32 state = (__reduce_min_sync(~0u, best) & 0xffff) << (16 - next) | node;
                    if (pass && lane == 0) {
                        states_out[layout.first_state(tile) + p] = state;
                        if (values_out)
                            values_out[layout.first_element(tile) + layout.element(p)] = float_of(value_of(state));
                    }
                    node = state >> width;
                }
                if (lane == 0) closing = node;
            }
            __syncthreads();
        }
    }
}
