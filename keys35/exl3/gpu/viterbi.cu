// Tail-biting Viterbi search over 16x16 tiles of the mul1 codebook, for 2 to 8 bits a weight.
//
// A tile is a ring of 256 positions. The state at a position is 16 bits k|j|l: its in-node is k|j, its out-node j|l,
// with k and l of BITS bits. One step of the search computes, for every out-node and in half precision,
//
//     cost'[j|l] = min over k of cost[k|j] + (value[k|j|l] - target)^2
//
// Two passes over the ring: the first starts free at position 128 and finds the node at which the ring closes, the
// second starts and ends at that node.
//
// How the work is laid out:
// - A block stays for the whole launch and holds all 65,536 codebook values in its registers: a thread's transitions never
//   change, so two of them cost a subtraction, a multiply-add and half of a three-way minimum.
// - A block advances several tiles in step. Their costs live in shared memory, twice: one copy is read, one written.
// - No back pointers: every KEPT steps the costs go to global memory, and the walk back tries all chains of KEPT
//   branches at once, a warp a tile. Two groups of tiles take turns, so one group's walk hides behind the other's steps.
// - Every 32 steps the smallest cost is subtracted, one step late, so costs stay small and never turn negative.
//   Halves that are not negative compare like integers: compute capability 9.0 takes the minimum of three at once.
//
// A tile's states depend on its targets alone: not on its place, its neighbours, the launch or the device.
//
// Compile-time settings: BITS (2 to 8), THREADS (256: two warps a scheduler, so that a thread has registers for its share of
// the codebook and as many again to keep many transitions under way).

#include "common.cuh"

static_assert(THREADS == 256, "the shares below are made for 256 threads");
constexpr int K = BITS, Q = 1 << K;              // branches into and out of a node
constexpr int NODES = 65536 >> K, J = NODES >> K;
constexpr int KEPT = K == 2 ? 4 : K == 3 ? 2 : 1;
constexpr int CHAINS = 1 << (K * KEPT), LINKS = RING / KEPT;

__device__ __forceinline__ u32 state_of(int k, int j, int l) { return k << (16 - K) | j << K | l; }
__device__ __forceinline__ u32 values_of(u32 state, u32 other) { return value_of(state) | value_of(other) << 16; }

// ---- a thread's share ------------------------------------------------------------------------------------------------
// Up to 5 bits: J_OWN neighbouring j, L_OWN neighbouring l, every k. From 6 bits: one j, two or four l, 1 / K_PARTS of the k.
// 2 and 3 bits keep costs in node order, with 16 bytes of padding every 128 against bank conflicts. The others keep
// rows of one j (or a pair of j), k inside, so that loads are 16 bytes wide; in a row, k is XORed with bits of the row's
// number, so that stores meet different banks. A thread takes the k in stored order, its codebook values likewise.

constexpr bool WIDE = K >= 6, ROWS = K >= 4;
constexpr int PAIRS = 32768 / THREADS;           // codebook registers a thread
constexpr int J_OWN = WIDE ? 1 : K == 2 ? 16 : K == 3 ? 4 : 2, J_PAIRS = WIDE ? 1 : J_OWN / 2;
constexpr int L_OWN = 2 * PAIRS / (J_OWN * Q) < 2 ? 2 : 2 * PAIRS / (J_OWN * Q), L_PARTS = Q / L_OWN;
constexpr int K_PARTS = J_OWN * L_OWN * Q / (2 * PAIRS), K_OWN = Q / K_PARTS;
constexpr int OUT = J_OWN * L_OWN;               // out-nodes of a thread
constexpr int COPY_BYTES = 2 * (ROWS ? NODES : NODES + NODES / 8);

__device__ __forceinline__ int scramble(int row) {
    if (K == 4) return (row >> 1 & 3) << 2 | (row >> 4 & 3);
    if (K == 5) return (row & 15) << 1;
    if (K == 6) return (row >> 1) << 2;
    return K == 7 ? (row >> 1) << 3 : 0;
}
__device__ __forceinline__ int cost_slot(int node) {   // which half of a cost copy holds a node
    int k = node / J, j = node % J;
    if (!ROWS) return node + 8 * (node >> 6);
    if (WIDE) return j * Q + (k ^ scramble(j));
    return 2 * ((j >> 1) * Q + (k ^ scramble(j >> 1))) + (j & 1);
}
__device__ __forceinline__ int kept_slot(int node) {   // which half of a kept step: threads write side by side
    int j = node / Q, l = node % Q;
    int thread = j / J_OWN * L_PARTS + l / L_OWN, o = j % J_OWN * L_OWN + l % L_OWN;
    return OUT < 8 ? thread * OUT + o : ((o >> 3) * THREADS + thread) * 8 + (o & 7);
}

struct Share {
    // Pairs over j: [pair of j][l][k]. From 6 bits, pairs over k: [l][pair of k].
    u32 value[PAIRS];
    int j, l, part;   // the first of its j and l; which share of k

    __device__ __forceinline__ Share(int thread) {
        part = thread % K_PARTS;
        l = thread / K_PARTS % L_PARTS * L_OWN;
        j = thread / K_PARTS / L_PARTS * J_OWN;
        #pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (WIDE) {
                int row = l + i / (K_OWN / 2), k = i % (K_OWN / 2) * 2;
                value[i] = values_of(state_of(branch(k), j, row), state_of(branch(k + 1), j, row));
            } else {
                u32 state = state_of(branch(i % Q), j + i / Q / L_OWN * 2, l + i / Q % L_OWN);
                value[i] = values_of(state, state + Q);
            }
        }
    }
    // The k that a thread meets i-th.
    __device__ __forceinline__ int branch(int i) const {
        if (WIDE) return ((i / 8 * K_PARTS + part) * 8 + i % 8) ^ scramble(j);
        return ROWS ? i ^ scramble(j >> 1) : i;
    }
};

// ---- one step of one tile --------------------------------------------------------------------------------------------

template <int WORDS> __device__ __forceinline__ void load_wide(const char* from, int stride, u32 (&words)[WORDS]) {
    #pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
        uint4 x = *reinterpret_cast<const uint4*>(from + i / 4 * stride);
        words[i] = x.x; words[i + 1] = x.y; words[i + 2] = x.z; words[i + 3] = x.w;
    }
}
__device__ __forceinline__ u32 lows(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 highs(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// The costs that a thread's transitions come from. Up to 5 bits, two j to a word: [k][pair of j]; from 6 bits two k.
struct Costs {
    u32 in[WIDE ? 1 : Q][J_PAIRS];

    __device__ __forceinline__ void read(const Share& own, const char* costs) {
        if constexpr (WIDE) return;
        else if constexpr (ROWS) {
            u32 row[Q];
            load_wide(costs + 4 * (own.j >> 1) * Q, 16, row);
            #pragma unroll
            for (int k = 0; k < Q; ++k) in[k][0] = row[k];
        } else {
            const char* from = costs + 2 * cost_slot(own.j);
            #pragma unroll
            for (int k = 0; k < Q; ++k, from += 2 * cost_slot(J)) {
                if constexpr (J_PAIRS >= 4) load_wide(from, 16, in[k]);
                else {
                    uint2 x = *reinterpret_cast<const uint2*>(from);
                    in[k][0] = x.x; in[k][J_PAIRS - 1] = x.y;
                }
            }
        }
    }
};

// The smallest way into each of this thread's out-nodes; best[] holds pairs over l.
__device__ __forceinline__ void relax(const Share& own, const Costs& from, const char* costs, u32 target,
                                      u32 (&best)[OUT / 2])
{
    auto through = [&](int i, u32 cost) { u32 d = sub2(own.value[i], target); return fma2(d, d, cost); };
    if constexpr (WIDE) {
        u32 in[K_OWN / 2], m[L_OWN];
        load_wide(costs + 2 * own.j * Q + 16 * own.part, 16 * K_PARTS, in);
        #pragma unroll
        for (int i = 0; i < K_OWN / 2; i += 2)
            #pragma unroll
            for (int l = 0; l < L_OWN; ++l) {
                u32 a = through(l * (K_OWN / 2) + i, in[i]), b = through(l * (K_OWN / 2) + i + 1, in[i + 1]);
                m[l] = i == 0 ? min2(a, b) : min2(min2(m[l], a), b);
            }
        #pragma unroll
        for (int l = 0; l < L_OWN; l += 2) {
            best[l / 2] = min2(lows(m[l], m[l + 1]), highs(m[l], m[l + 1]));
            #pragma unroll
            for (int lane = 1; lane < K_PARTS; lane *= 2)
                best[l / 2] = min2(best[l / 2], __shfl_xor_sync(~0u, best[l / 2], lane));
        }
    } else {
        #pragma unroll
        for (int pair = 0; pair < J_PAIRS; ++pair) {
            u32 m[L_OWN];
            #pragma unroll
            for (int k = 0; k < Q; k += 2)
                #pragma unroll
                for (int l = 0; l < L_OWN; ++l) {
                    int i = (pair * L_OWN + l) * Q + k;
                    u32 a = through(i, from.in[k][pair]), b = through(i + 1, from.in[k + 1][pair]);
                    m[l] = k == 0 ? min2(a, b) : min2(min2(m[l], a), b);
                }
            #pragma unroll
            for (int l = 0; l < L_OWN; l += 2) {
                best[pair * L_OWN + l / 2] = lows(m[l], m[l + 1]);
                best[pair * L_OWN + L_OWN / 2 + l / 2] = highs(m[l], m[l + 1]);
            }
        }
    }
}

__device__ __forceinline__ void store_costs(const Share& own, char* costs, const u32 (&best)[OUT / 2]) {
    int node = own.j * Q + own.l;
    if constexpr (K == 8) {
        if (own.part == 0) *reinterpret_cast<u32*>(costs + 2 * node) = best[0];
    } else if constexpr (WIDE) {
        #pragma unroll
        for (int o = 0; o < OUT; ++o)
            if (o % K_PARTS == own.part)
                *reinterpret_cast<u16*>(costs + 2 * cost_slot(node + o)) = best[o / 2] >> o % 2 * 16 & 0xffff;
    } else if constexpr (ROWS) {
        #pragma unroll
        for (int o = 0; o < OUT / 2; ++o) {
            int out_node = node + o / (L_OWN / 2) * Q + o % (L_OWN / 2) * 2;
            *reinterpret_cast<u32*>(costs + 2 * cost_slot(out_node)) = best[o];
        }
    } else {
        uint4* to = reinterpret_cast<uint4*>(costs + 2 * cost_slot(node));
        #pragma unroll
        for (int o = 0; o < OUT / 2; o += 4) to[o / 4] = make_uint4(best[o], best[o + 1], best[o + 2], best[o + 3]);
    }
}

// Costs of a kept step, written past the caches' usual ways: they are read once, much later.
__device__ __forceinline__ void keep(const Share& own, int thread, u16* to, const u32 (&best)[OUT / 2]) {
    if constexpr (OUT == 2) {
        if (own.part == 0) __stcs(reinterpret_cast<u32*>(to) + thread / K_PARTS, best[0]);
    } else if constexpr (OUT == 4) {
        __stcs(reinterpret_cast<uint2*>(to) + thread, make_uint2(best[0], best[1]));
    } else {
        #pragma unroll
        for (int o = 0; o < OUT / 2; o += 4)
            __stcs(reinterpret_cast<uint4*>(to) + o / 4 * THREADS + thread,
                   make_uint4(best[o], best[o + 1], best[o + 2], best[o + 3]));
    }
}

// ---- the walk back ---------------------------------------------------------------------------------------------------

// One link leads from the node after step (link + 1) * KEPT - 1 to the node before step link * KEPT. A warp tries all
// chains of KEPT branches, with the search's own arithmetic; every KEPT steps of the search ahead it has time for one
// link, which at 2 bits is spread over those steps: the warps that walk shall not hold up the others. Kept costs are
// fetched before the step that uses them.
constexpr int SHARES = K == 2 ? 4 : 1, SHARE = CHAINS / SHARES, SHARE_OWN = (SHARE + 31) / 32;
struct Walk {
    const u16* kept;      // the tile's kept costs
    const u16* targets;   // in ring order
    const u32* lowest;
    int ring_start, closing, node, link, last_link, share;
    u32 best, fetched[SHARE_OWN];

    __device__ __forceinline__ bool going() const { return link >= last_link; }
    // A chain's branches in front of the node's bits: every state of the chain is 16 neighbouring bits of this.
    __device__ __forceinline__ u32 with_node(int chain) const { return chain << (16 - K) | node; }

    __device__ __forceinline__ void fetch(int lane) {
        const u16* costs = kept + (size_t)(link - 1) * NODES;
        #pragma unroll
        for (int i = 0; i < SHARE_OWN; ++i) {
            int from = with_node(share * SHARE + lane + 32 * i) >> K * KEPT & (NODES - 1);
            fetched[i] = link ? (u32)__ldcg(costs + kept_slot(from)) : from == closing ? 0 : INFINITE;
        }
    }
    // Tries the chains of a share, whose costs were fetched; ties go to the smallest chain.
    __device__ __forceinline__ void weigh(int lane) {
        const int begins = link * KEPT;
        const u16* target = targets + (ring_start + begins & RING - 1);
        u32 lowering = begins % LOWER == 0 ? lowest[begins / LOWER] : 0;
        if (SHARES == 1 || share == 0) best = ~0u;
        #pragma unroll
        for (int i = 0; i < SHARE_OWN; ++i) {
            int chain = share * SHARE + lane + 32 * i;
            u32 states = with_node(chain), cost = fetched[i];
            #pragma unroll
            for (int r = KEPT - 1; r >= 0; --r) {
                u32 d = sub2(value_of(states >> K * r & 0xffff), target[KEPT - 1 - r]);
                cost = fma2(d, d, cost);
                if (r == KEPT - 1) cost = sub2(cost, lowering);
            }
            if (SHARE >= 32 || lane < SHARE) best = min(best, cost << 16 | chain);
        }
    }
    // All bits of the cheapest chain and the node it leads to.
    __device__ __forceinline__ u32 settle() const { return with_node(__reduce_min_sync(~0u, best) & 0xffff); }
};

// A tile's shared memory: two copies of its costs, then for each side (the two groups that take turns) its targets, the
// smallest cost at each lowering, and the node at which its ring closes.
constexpr int SIDE_BYTES = 2 * RING + 4 * LOWERINGS + 12, TILE_BYTES = 2 * COPY_BYTES + 2 * SIDE_BYTES;
struct Side {
    char* at;
    __device__ __forceinline__ Side(char* tile, int side) : at(tile + 2 * COPY_BYTES + side * SIDE_BYTES) {}
    __device__ __forceinline__ u16* targets() const { return reinterpret_cast<u16*>(at); }
    __device__ __forceinline__ u32* lowest() const { return reinterpret_cast<u32*>(at + 2 * RING); }
    __device__ __forceinline__ int* closing() const { return reinterpret_cast<int*>(at + 2 * RING + 4 * LOWERINGS); }
};

// Except at 2 bits there are registers to read a tile's costs while the results of the tile before are stored.
constexpr bool AHEAD = K > 2;

// One step of every tile of a group. What a step does besides is settled at compile time, so that the loop over tiles is
// one run of arithmetic without a branch.
template <bool LOWERS, bool MEASURES, bool KEEPS>
__device__ __forceinline__ void advance(const Share& own, int thread, int count, char* tile, int in, int target_at,
                                        int low_at, u16* kept)
{
    const int out = COPY_BYTES - in;
    Costs costs;
    u32 target;
    auto read = [&](const char* tile) {
        costs.read(own, tile + in);
        target = twice(*reinterpret_cast<const u16*>(tile + target_at));
    };
    if (AHEAD) read(tile);
    #pragma unroll 1
    do {
        u32 best[OUT / 2];
        if (!AHEAD) read(tile);
        relax(own, costs, tile + in, target, best);
        char* const next = AHEAD && count == 1 ? tile : tile + TILE_BYTES;
        if (AHEAD) read(next);
        if (LOWERS) {   // by the smallest cost of the step before
            u32 by = twice(*reinterpret_cast<u32*>(tile + low_at));
            #pragma unroll
            for (int o = 0; o < OUT / 2; ++o) best[o] = sub2(best[o], by);
        }
        store_costs(own, tile + out, best);
        if (KEEPS) keep(own, thread, kept, best);
        if (MEASURES) {
            u32 m = best[0];
            #pragma unroll
            for (int o = 1; o < OUT / 2; ++o) m = min2(m, best[o]);
            m = __reduce_min_sync(~0u, smaller_half(m));
            if (thread % 32 == 0) atomicMin(reinterpret_cast<u32*>(tile + low_at + 4), m);
        }
        tile = next;
        kept += (size_t)LINKS * NODES;
    } while (--count);
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
viterbi(const float* targets_in, float* values_out, u16* states_out, u16* history, int tiles, int group_tiles,
        int columns, int row_stride, long long strip_stride, long long states_stride)
{
    extern __shared__ __align__(16) char shared[];   // [group_tiles][TILE_BYTES]
    const Layout layout{columns, row_stride, strip_stride, states_stride};
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Share own(thread);
    char* const my_tile = shared + warp * TILE_BYTES;   // the tile this warp walks back over

    const int first = (long long)tiles * blockIdx.x / gridDim.x;
    const int mine = (int)((long long)tiles * (blockIdx.x + 1) / gridDim.x) - first;
    if (mine == 0) return;
    int groups = (mine + group_tiles - 1) / group_tiles;
    groups += groups & 1;   // pairs of groups take turns; with a single tile, one of the two is empty
    auto group_start = [&](int g) { return first + (int)((long long)mine * g / groups); };
    constexpr size_t TILE_KEPT = (size_t)LINKS * NODES;
    u16* const kept_by_block = history + blockIdx.x * 2 * group_tiles * TILE_KEPT;

    for (int phase = 0; phase <= 2 * groups; ++phase) {
        // Ahead: this phase's group and pass. Behind: the walk back over the group of the phase before.
        const int ahead = phase / 4 * 2 + phase % 2, pass = phase / 2 % 2, side = ahead & 1;
        const int from_tile = group_start(ahead), count = phase < 2 * groups ? group_start(ahead + 1) - from_tile : 0;
        const int last = phase - 1, behind = last / 4 * 2 + last % 2, behind_pass = last / 2 % 2;
        const int behind_tile = group_start(behind) + warp;
        const bool walks = phase > 0 && behind_tile < group_start(behind + 1);

        // Lay out the group's targets and its first costs.
        for (int i = thread; pass == 0 && i < count * RING; i += THREADS) {
            int tile = i / RING, p = i % RING;
            float x = targets_in[layout.first_element(from_tile + tile) + layout.element(p)];
            Side(shared + tile * TILE_BYTES, side).targets()[p] = target_half(x);
        }
        for (int i = thread; i < count * LOWERINGS; i += THREADS)
            Side(shared + i / LOWERINGS * TILE_BYTES, side).lowest()[i % LOWERINGS] = i % LOWERINGS ? LARGEST : 0;
        for (int i = thread; i < count * (COPY_BYTES / 16); i += THREADS) {
            u32 c = pass ? twice(INFINITE) : 0;
            char* at = shared + i / (COPY_BYTES / 16) * TILE_BYTES + i % (COPY_BYTES / 16) * 16;
            *reinterpret_cast<uint4*>(at) = make_uint4(c, c, c, c);
        }
        __syncthreads();
        if (pass && warp < count && lane == 0)
            *reinterpret_cast<u16*>(my_tile + 2 * cost_slot(*Side(my_tile, side).closing())) = 0;
        __syncthreads();

        Walk walk;
        walk.link = -1, walk.last_link = 0;
        u16* states_to = nullptr;
        float* values_to = nullptr;
        if (walks) {
            const Side walked(my_tile, behind & 1);
            walk.kept = kept_by_block + ((behind & 1) * group_tiles + warp) * TILE_KEPT;
            walk.targets = walked.targets(), walk.lowest = walked.lowest();
            walk.closing = walk.node = *walked.closing();
            walk.link = LINKS - 1, walk.last_link = behind_pass ? 0 : HALF_RING / KEPT;
            walk.ring_start = behind_pass ? 0 : HALF_RING;
            walk.share = 0;
            states_to = states_out + layout.first_state(behind_tile);
            values_to = values_out ? values_out + layout.first_element(behind_tile) : nullptr;
            walk.fetch(lane);
        }

        const int first_kept = pass ? 0 : HALF_RING - 1;
        u16* kept = kept_by_block + side * group_tiles * TILE_KEPT;
        int target_at = 2 * COPY_BYTES + side * SIDE_BYTES + (pass ? 0 : 2 * HALF_RING);
        int low_at = 2 * COPY_BYTES + side * SIDE_BYTES + 2 * RING;
        for (int step = 0; step < RING; ++step) {
            if (walk.going() && (step % (KEPT / SHARES) == 0 || count == 0)) {
                walk.weigh(lane);
                if (++walk.share == SHARES) {
                    u32 states = walk.settle();
                    if (behind_pass && lane < KEPT) {
                        u32 state = states >> K * lane & 0xffff;
                        int p = walk.link * KEPT + KEPT - 1 - lane;
                        states_to[p] = state;
                        if (values_to) values_to[layout.element(p)] = float_of(value_of(state));
                    }
                    walk.node = states >> K * KEPT & (NODES - 1);
                    walk.share = 0;
                    --walk.link;
                }
                if (walk.going()) walk.fetch(lane);
            }
            if (count == 0) continue;
            const int in = (step & 1) * COPY_BYTES;
            const bool keeps = step % KEPT == KEPT - 1 && step >= first_kept;
#define ADVANCE(LOWERS, MEASURES, KEEPS) \
    advance<LOWERS, MEASURES, KEEPS>(own, thread, count, shared, in, target_at, low_at, kept)
            if (step % LOWER == 0) {
                if (KEPT == 1 && keeps) ADVANCE(true, false, KEPT == 1);
                else ADVANCE(true, false, false);
            } else if (step % LOWER == LOWER - 1) {
                if (keeps) ADVANCE(false, true, true);
                else ADVANCE(false, true, false);
            } else if (keeps) ADVANCE(false, false, true);
            else ADVANCE(false, false, false);
            __syncthreads();
            target_at += !pass && step == HALF_RING - 1 ? 2 - 2 * RING : 2;
            if (step % LOWER == LOWER - 1) low_at += 4;
            if (step % KEPT == KEPT - 1) kept += NODES;
        }
        __syncthreads();
        if (walks && !behind_pass && lane == 0) *Side(my_tile, behind & 1).closing() = walk.node;
        if (!pass && warp < count) {   // the cheapest end node, ties to the smallest; 256 steps end in the first copy
            u32 best = ~0u;
            #pragma unroll 8
            for (int n = lane; n < NODES; n += 32)
                best = min(best, (u32) *reinterpret_cast<u16*>(my_tile + 2 * cost_slot(n)) << 16 | n);
            best = __reduce_min_sync(~0u, best);
            if (lane == 0) *Side(my_tile, side).closing() = best & 0xffff;
        }
        __syncthreads();
    }
}
