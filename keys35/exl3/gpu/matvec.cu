// Vectors times encoded matrices, straight from the trellis: one linear after another, or a layer's chosen experts whole.
//
// A block takes a slice of a matrix's inputs and a range of its outputs. It scales and rotates its slice of the vector, cuts
// it into two limbs, and keeps them in shared memory the way tensor cores want them: a weight's word is four bytes
// (mul1) or two halves that add up to its value, so each limb stands there four times or twice, and the product with
// the word adds them up. The word itself, fresh from its hash, is the other operand. mul1: 16-bit integers, sums exact in
// int32; mcg and 3inst: pairs of halves, sums float32. The parts of different slices are added in a fixed order, so
// results repeat to the last bit. Packed words come by asynchronous copies, several steps ahead. Against the codebook's definition a value lacks its rounding to a half (about 1e-4).
// Defines: CODEBOOK, COLUMNS (tiles a warp takes side by side), UNROLL (tiles below each other), BLOCKS (a multiprocessor),
// RING (bytes of packed words a warp holds).

#include "stream.cuh"

constexpr int SIDE = 128, WARPS = 8, THREADS = 32 * WARPS, LARGEST_SLICE = WARPS * SIDE;
constexpr float ROOT = 0.08838834764831845f;   // 1 / sqrt(128)

#if CODEBOOK == 0
typedef int Sum;
#else
typedef float Sum;
#endif

// What a block holds of its slice. limbs[tile][limb][q]: the limb of rows 2q, 2q+1, 2q+8, 2q+9.
struct Shared {
    uint4 words[WARPS][RING / 16];
    uint4 limbs[LARGEST_SLICE / 16][2][4];
    uint4 nothing;
    float reach[WARPS];
    int total[WARPS];
};

// H128 / sqrt(128) of a row of 128 whose elements 4 lane .. 4 lane + 3 a lane holds.
__device__ __forceinline__ float4 rotate(float4 v) {
    float a = v.x + v.y, b = v.x - v.y, c = v.z + v.w, d = v.z - v.w;
    float x[4] = {a + c, b + d, a - c, b - d};
    #pragma unroll
    for (int step = 1; step < 32; step *= 2)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], step);
            x[i] = threadIdx.x & step ? other - x[i] : x[i] + other;
        }
    return make_float4(x[0] * ROOT, x[1] * ROOT, x[2] * ROOT, x[3] * ROOT);
}

__device__ __forceinline__ float4 times(float4 v, const u16* scale) {   // four of a vector's own scales
    const uint2 s = *reinterpret_cast<const uint2*>(scale);
    return make_float4(v.x * float_of(s.x), v.y * float_of(s.x >> 16), v.z * float_of(s.y), v.w * float_of(s.y >> 16));
}

// The slice's rotated inputs as limbs; returns the unit of the integers, and their sum in `total`. A warp does 128 inputs.
__device__ __noinline__ float prepare(Shared& shared, const float* x, const u16* suh, int rows, int& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, place = warp * SIDE + 4 * lane;
    const bool mine = warp * SIDE < rows;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (mine) v = rotate(times(load_fresh(x + place), suh + place));
    float reach = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    #pragma unroll
    for (int step = 16; step; step /= 2) reach = fmaxf(reach, __shfl_xor_sync(0xffffffffu, reach, step));
    __syncthreads();   // the last item's limbs are no longer needed
    if (!threadIdx.x) shared.nothing = make_uint4(0, 0, 0, 0);
    if (!lane) shared.reach[warp] = reach;
    __syncthreads();
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) reach = fmaxf(reach, shared.reach[w]);
    const float unit = reach > 0.f ? reach / 32512.f : 1.f, inverse = 1.f / unit;

    const float y[4] = {v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse};
    int sum = 0;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = place % 16 + i, q = row / 2 % 4, slot = row % 2 + row / 8 * 2;
        u32 high, low;
#if CODEBOOK == 0
        const int whole = __float2int_rn(y[i]), upper = whole + 128 >> 8;
        sum += whole;
        high = (upper & 0xff) * 0x01010101u;
        low = (whole - upper * 256 & 0xff) * 0x01010101u;
#else
        high = pack_half(y[i], y[i]);
        const float rest = y[i] - float_of(high);
        low = pack_half(rest, rest);
#endif
        if (mine) {
            reinterpret_cast<u32*>(&shared.limbs[place / 16][0][q])[slot] = high;
            reinterpret_cast<u32*>(&shared.limbs[place / 16][1][q])[slot] = low;
        }
    }
    #pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (!lane) shared.total[warp] = sum;
    __syncthreads();
    total = 0;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) total += shared.total[w];
    return unit;
}

__device__ __forceinline__ void multiply(Sum (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if CODEBOOK == 0
    mma_bytes(d, a0, a1, a2, a3, b0, b1);
#else
    mma_half(d, a0, a1, a2, a3, b0, b1);
#endif
}

// A warp's COLUMNS x (rows / 16) tiles, a step of a few rows of them at a time, through its ring of packed words.
template <int K> struct Strip {
    static constexpr int DEEP = K <= 4 ? UNROLL : (UNROLL + 1) / 2;   // rows of tiles a step
    static constexpr int ROW = COLUMNS * Stream<K>::TILE, STEP = DEEP * ROW;   // words
    static constexpr int FIT = RING / 4 / STEP, STEPS = FIT < 2 ? 2 : FIT > 8 ? 8 : FIT;
    static_assert(STEPS * STEP * 4 <= RING, "the ring holds two steps");

    u32* ring;
    const u32* from;
    long long row_words;
    int steps, lane;

    __device__ __forceinline__ Strip(Shared& shared, const u32* first, long long words, int rows)
        : ring(reinterpret_cast<u32*>(shared.words[threadIdx.x / 32])), from(first), row_words(words),
          steps(rows / 16 / DEEP), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void fetch(int step, int place) const {
        if (step < steps)
            #pragma unroll
            for (int u = 0; u < DEEP; ++u)
                #pragma unroll
                for (int i = 0; i < (ROW + 127) / 128; ++i)
                    if (ROW % 128 == 0 || 4 * (lane + 32 * i) < ROW)
                        copy_ahead(ring + place * STEP + u * ROW + 4 * (lane + 32 * i),
                                   from + (step * DEEP + u) * row_words + 4 * (lane + 32 * i));
        close_group();
    }

    __device__ __forceinline__ void begin() const {
        #pragma unroll
        for (int step = 0; step < STEPS - 1; ++step) fetch(step, step);
    }

    // Of column g, sums[c][0] and [1] get the two limbs' products, of column g + 8 [2] and [3], in lanes with q = 0.
    __device__ __forceinline__ void product(const Shared& shared, Sum (&sums)[COLUMNS][4]) const {
        const int g = lane / 4, q = lane % 4, stride = g < 2 ? 8 : 0;   // other lanes' columns of the limbs are zero
        const uint4* limbs = g < 2 ? &shared.limbs[0][g][q] : &shared.nothing;
        const Stream<K> stream(lane);
        for (int step = 0, place = 0; step < steps; ++step) {
            wait_for_all_but<STEPS - 2>();
            __syncwarp();
            fetch(step + STEPS - 1, place ? place - 1 : STEPS - 1);
            #pragma unroll
            for (int u = 0; u < DEEP; ++u) {
                const uint4 b = *limbs;
                limbs += stride;
                #pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const u32* tile = ring + place * STEP + u * ROW + c * Stream<K>::TILE;
                    u32 words[Stream<K>::WORDS], s[8];
                    #pragma unroll
                    for (int j = 0; j < Stream<K>::WORDS; ++j) words[j] = tile[stream.at[j]];
                    stream.states(words, s);
                    #pragma unroll
                    for (int j = 0; j < 8; ++j) s[j] = word_of(s[j]);
                    multiply(sums[c], s[0], s[4], s[1], s[5], b.x, b.y);
                    multiply(sums[c], s[2], s[6], s[3], s[7], b.z, b.w);
                }
            }
            place = place + 1 < STEPS ? place + 1 : 0;
        }
        wait_for_all_but<0>();
        __syncwarp();
    }
};

__device__ __forceinline__ float value(Sum high, Sum low, float unit, int total) {
#if CODEBOOK == 0
    return unit * (STEP * (256.f * high + low) + FLOOR * total);
#else
    return unit * (high + low);
#endif
}

// How a matrix is cut: slices of `slice` inputs, ranges of 8 COLUMNS tiles of outputs.
struct Cut {
    int slices, ranges;
    __device__ __forceinline__ Cut(long long rows, long long columns, int slice) {
        slices = (rows + slice - 1) / slice;
        ranges = (columns + WARPS * COLUMNS * 16 - 1) / (WARPS * COLUMNS * 16);
    }
};

// One slice and range of x W, still rotated: parts[slice][columns]. `item` counts slices within ranges. Copies begin before
// the inputs are prepared, all warps prepare, and warps beyond the last column do no more.
template <int K> __device__ __forceinline__ void
part_of_width(Shared& shared, const Linear& linear, const float* x, float* parts, int first, int rows, int column) {
    const long long tiles = linear.columns / 16;
    const Strip<K> strip(shared, linear.trellis + (first / 16 * tiles + column) * 8 * K, tiles * 8 * K, rows);
    const bool busy = column < tiles;
    if (busy) strip.begin();
    int total;
    const float unit = prepare(shared, x + first, linear.suh + first, rows, total);
    if (!busy) return;
    Sum sums[COLUMNS][4] = {};
    strip.product(shared, sums);
    const int lane = threadIdx.x % 32;
    if (lane % 4 == 0)
        #pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            #pragma unroll
            for (int h = 0; h < 2; ++h)
                parts[(column + c) * 16 + 8 * h + lane / 4] = value(sums[c][2 * h], sums[c][2 * h + 1], unit, total);
}

__device__ __forceinline__ void
part_of_product(Shared& shared, const Linear& linear, const float* x, float* parts, int item, int slice, const Cut& cut) {
    const int which = item % cut.slices, range = item / cut.slices, first = which * slice;
    const int rows = min(slice, (int)linear.rows - first), column = (range * WARPS + threadIdx.x / 32) * COLUMNS;
    parts += which * linear.columns;
    #define WIDTH(K) case K: part_of_width<K>(shared, linear, x, parts, first, rows, column); break;
    switch (linear.bits) { WIDTH(1) WIDTH(2) WIDTH(3) WIDTH(4) WIDTH(5) WIDTH(6) WIDTH(7) WIDTH(8) }
    #undef WIDTH
}

// The slices of four outputs of a warp's block of 128, added up in order.
__device__ __forceinline__ float4 sum_of_parts(const float* parts, long long columns, int slices, int place) {
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s = 0; s < slices; s += 4) {   // four loads under way
        float4 v[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = s + i < slices ? load_fresh(parts + (s + i) * columns + place) : make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int i = 0; i < 4; ++i) { y.x += v[i].x; y.y += v[i].y; y.z += v[i].z; y.w += v[i].w; }
    }
    return y;
}

// Rotated back and scaled.
__device__ __forceinline__ float4 outputs(const Linear& linear, const float* parts, int slices, int place) {
    return times(rotate(sum_of_parts(parts, linear.columns, slices, place)), linear.svh + place);
}

// All blocks of the grid meet here. barrier: arrivals and rounds, both zero before the first launch ever.
__device__ __forceinline__ void meet(u32* barrier) {
    __syncthreads();
    if (!threadIdx.x) {
        const u32 round = load_shared_by_all(barrier + 1);
        __threadfence();
        if (atomicAdd(barrier, 1u) == gridDim.x - 1) {
            barrier[0] = 0;
            __threadfence();
            atomicAdd(barrier + 1, 1u);
        } else {
            while (load_shared_by_all(barrier + 1) == round) {}
        }
        __threadfence();
    }
    __syncthreads();
}

// y[i] = x[i] W[which[i]], float32, for matrices of one shape. parts: [count][slices][columns]. A cooperative launch.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
matvec(const Linear* linears, const int* which, int count, const float* x, float* y, float* parts, u32* barrier, int slice)
{
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const int rows = linears[which[0]].rows, columns = linears[which[0]].columns;
    const Cut cut(rows, columns, slice);
    const int each = cut.slices * cut.ranges;
    for (int item = blockIdx.x; item < count * each; item += gridDim.x) {
        const int i = item / each;
        part_of_product(shared, linears[which[i]], x + (long long)i * rows, parts + (long long)i * cut.slices * columns,
                        item % each, slice, cut);
    }
    meet(barrier);
    const int warp = threadIdx.x / 32, place = 4 * (threadIdx.x % 32), blocks = columns / SIDE;
    for (int item = warp * gridDim.x + blockIdx.x; item < count * blocks; item += gridDim.x * WARPS) {
        const int i = item / blocks, at = item % blocks * SIDE + place;
        const float4 v = outputs(linears[which[i]], parts + (long long)i * cut.slices * columns, cut.slices, at);
        *reinterpret_cast<float4*>(y + (long long)i * columns + at) = v;
    }
}

// out[t] = sum over the token's pairs of weight * down(silu(gate x) * up x). Pairs (token, expert) lie token by token,
// `each` of them a token; linears[3 e + 0, 1, 2] are gate, up and down of expert e. Every expert may have its own width.
// parts: floats for the larger of the two products; hidden: [pairs][inner]. A cooperative launch.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
experts(const Linear* linears, const int* chosen, const float* weights, int pairs, int each, const float* x, float* out,
        float* parts, float* hidden, u32* barrier, int slice_in, int slice_out)
{
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const int outer = linears[0].rows, inner = linears[0].columns;
    const int warp = threadIdx.x / 32, place = 4 * (threadIdx.x % 32);

    const Cut in(outer, inner, slice_in);
    const int items = in.slices * in.ranges;
    for (int item = blockIdx.x; item < pairs * 2 * items; item += gridDim.x) {
        const int matrix = item / items, pair = matrix / 2;
        part_of_product(shared, linears[3 * chosen[pair] + matrix % 2], x + (long long)(pair / each) * outer,
                        parts + (long long)matrix * in.slices * inner, item % items, slice_in, in);
    }
    meet(barrier);
    for (int item = warp * gridDim.x + blockIdx.x; item < pairs * (inner / SIDE); item += gridDim.x * WARPS) {
        const int pair = item / (inner / SIDE), at = item % (inner / SIDE) * SIDE + place;
        const Linear* expert = linears + 3 * chosen[pair];
        const float* of = parts + (long long)pair * 2 * in.slices * inner;
        const float4 sums[2] = {sum_of_parts(of, inner, in.slices, at),
                                sum_of_parts(of + (long long)in.slices * inner, inner, in.slices, at)};
        const float4 g = times(rotate(sums[0]), expert[0].svh + at), u = times(rotate(sums[1]), expert[1].svh + at);
        *reinterpret_cast<float4*>(hidden + (long long)pair * inner + at) =
            make_float4(g.x / (1.f + expf(-g.x)) * u.x, g.y / (1.f + expf(-g.y)) * u.y,
                        g.z / (1.f + expf(-g.z)) * u.z, g.w / (1.f + expf(-g.w)) * u.w);
    }
    meet(barrier);
    const Cut back(inner, outer, slice_out);
    const int more = back.slices * back.ranges;
    for (int item = blockIdx.x; item < pairs * more; item += gridDim.x) {
        const int pair = item / more;
        part_of_product(shared, linears[3 * chosen[pair] + 2], hidden + (long long)pair * inner,
                        parts + (long long)pair * back.slices * outer, item % more, slice_out, back);
    }
    meet(barrier);
    float4* sums = reinterpret_cast<float4*>(dynamic_shared());   // [warp][lane]
    for (int item = blockIdx.x; item < pairs / each * (outer / SIDE); item += gridDim.x) {
        const int token = item / (outer / SIDE), at = item % (outer / SIDE) * SIDE + place;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int e = warp; e < each; e += WARPS) {
            const int pair = token * each + e;
            const float weight = weights[pair];
            const float4 y = outputs(linears[3 * chosen[pair] + 2], parts + (long long)pair * back.slices * outer,
                                     back.slices, at);
            sum.x += weight * y.x; sum.y += weight * y.y; sum.z += weight * y.z; sum.w += weight * y.w;
        }
        __syncthreads();
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (warp) continue;
        for (int w = 1; w < WARPS; ++w) {
            const float4 other = sums[w * 32 + threadIdx.x];
            sum.x += other.x; sum.y += other.y; sum.z += other.z; sum.w += other.w;
        }
        *reinterpret_cast<float4*>(out + (long long)token * outer + at) = sum;
    }
}
