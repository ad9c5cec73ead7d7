// Many encoded matrices to bfloat16 or half in one launch, at the speed of memory. Each may have its own width.
//
// A block of sixteen warps makes 128 x 128 weights: a warp decodes four tiles below each other. H128 is H8 over tiles times
// H16 inside a tile, and so on either side: tensor cores do both H16 of a tile as it is decoded (the lanes already hold it
// as a fragment), additions in registers the H4 over a warp's tiles, and after an exchange what is left.
// Sums are float32; between the two H16 a tile is rounded to halves, or kept to 22 bits with -DEXACT=1.
// Code is kept short (half a strip a warp; one path for all narrow widths with -DNARROW=1): it runs once and is fetched once.
// Defines: CODEBOOK, BRAIN (output bfloat16, else half), EXACT, PACKED (sums over tiles in halves: fewer registers, less
// shared memory, errors near the output's own rounding), BLOCKS (a multiprocessor).

#include "stream.cuh"

constexpr int SIDE = 128, WARPS = 16, TALL = 4;   // tiles a warp decodes
#if PACKED
typedef u32 Part;    // two neighbours in a row, as halves
constexpr int PARTS = 4, PITCH = 76;
__device__ __forceinline__ Part add(Part a, Part b) { return add2(a, b); }
__device__ __forceinline__ Part sub(Part a, Part b) { return sub2(a, b); }
#else
typedef float Part;
constexpr int PARTS = 8, PITCH = 136;
__device__ __forceinline__ Part add(Part a, Part b) { return a + b; }
__device__ __forceinline__ Part sub(Part a, Part b) { return a - b; }
#endif

// A Hadamard transform over COUNT tiles of which a thread holds a few values each.
template <int COUNT, int VALUES> __device__ __forceinline__ void over_tiles(Part (&x)[COUNT][VALUES]) {
    #pragma unroll
    for (int half = 1; half < COUNT; half *= 2)
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!(i & half))
                #pragma unroll
                for (int p = 0; p < VALUES; ++p) {
                    const Part low = x[i][p], high = x[i + half][p];
                    x[i][p] = add(low, high);
                    x[i + half][p] = sub(low, high);
                }
}

// Two neighbours of a row of H16, divided by 8, as halves.
__device__ __forceinline__ u32 signs(int row, int column) {
    return (0x3000u | (__popc(row & column) & 1) << 15) | (0x3000u | (__popc(row & (column + 1)) & 1) << 15) << 16;
}

// H16 W H16 / 64 of a tile given as the lane's four pairs of values; h: the lane's fragment of H16 / 8.
__device__ __forceinline__ void rotate_tile(const u32 (&b)[4], const u32 (&h)[4], float (&d)[2][4]) {
    float left[4] = {}, right[4] = {};
    mma_half(left, h[0], h[1], h[2], h[3], b[0], b[1]);
    mma_half(right, h[0], h[1], h[2], h[3], b[2], b[3]);
    const u32 a[4] = {pack_half(left[0], left[1]), pack_half(left[2], left[3]),
                      pack_half(right[0], right[1]), pack_half(right[2], right[3])};
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int p = 0; p < 4; ++p) d[m][p] = 0.f;
        mma_half(d[m], a[0], a[1], a[2], a[3], h[m], h[m + 2]);
    }
#if EXACT
    u32 rest[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* of = i < 2 ? left + 2 * i : right + 2 * i - 4;
        rest[i] = pack_half(of[0] - float_of(a[i]), of[1] - float_of(a[i] >> 16));
    }
    #pragma unroll
    for (int m = 0; m < 2; ++m) mma_half(d[m], rest[0], rest[1], rest[2], rest[3], h[m], h[m + 2]);
#endif
}

template <class Reader>
__device__ __forceinline__ void strip(const Reader& stream, const u32* trellis, long long row_words, Part (&x)[TALL][PARTS]) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 h[4] = {signs(g, 2 * q), signs(g + 8, 2 * q), signs(g, 2 * q + 8), signs(g + 8, 2 * q + 8)};
    u32 words[TALL][Reader::WORDS];
    #pragma unroll
    for (int i = 0; i < TALL; ++i)
        #pragma unroll
        for (int j = 0; j < Reader::WORDS; ++j) words[i][j] = load_once(trellis + i * row_words + stream.at[j]);
    #pragma unroll
    for (int i = 0; i < TALL; ++i) {
        u32 s[8], b[4];
        stream.states(words[i], s);
        #pragma unroll
        for (int j = 0; j < 4; ++j) b[j] = values_of(s[2 * j], s[2 * j + 1]);
        float d[2][4];
        rotate_tile(b, h, d);
        #pragma unroll
        for (int p = 0; p < PARTS; ++p)
#if PACKED
            x[i][p] = pack_half(d[p / 2][p % 2 * 2], d[p / 2][p % 2 * 2 + 1]);
#else
            x[i][p] = d[p / 4][p % 4];
#endif
    }
    over_tiles(x);
}

__device__ __forceinline__ u32 pack_output(float low, float high) {
#if BRAIN
    return pack_brain(low, high);
#else
    return pack_half(low, high);
#endif
}

// Two neighbours in two rows 64 apart, in all eight tiles of their rows: read, transformed, scaled, written.
__device__ __forceinline__ void finish(const Part* block, const float* svh, const u16* suh, int row, int pair, u16* out, long long pitch) {
    constexpr int VALUES = PACKED ? 1 : 2;
    Part x[2][8][VALUES];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        #pragma unroll
        for (int c = 0; c < 8; ++c) {
            const Part* from = block + (row + 64 * r) * PITCH + VALUES * (8 * c + pair);
#if PACKED
            x[r][c][0] = *from;
#else
            const float2 v = *reinterpret_cast<const float2*>(from);
            x[r][c][0] = v.x;
            x[r][c][1] = v.y;
#endif
        }
        over_tiles(x[r]);
    }
    const float scales[2] = {0.5f * float_of(suh[row]), 0.5f * float_of(suh[row + 64])};   // 1 / 128 with both H16 / 8
    #pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float2 s = *reinterpret_cast<const float2*>(svh + 16 * c + 2 * pair);
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            float y[2];
#if PACKED
            const Part v = r ? sub(x[0][c][0], x[1][c][0]) : add(x[0][c][0], x[1][c][0]);
            y[0] = float_of(v);
            y[1] = float_of(v >> 16);
#else
            #pragma unroll
            for (int i = 0; i < 2; ++i) y[i] = r ? sub(x[0][c][i], x[1][c][i]) : add(x[0][c][i], x[1][c][i]);
#endif
            *reinterpret_cast<u32*>(out + (row + 64 * r) * pitch + 16 * c + 2 * pair) =
                pack_output(scales[r] * y[0] * s.x, scales[r] * y[1] * s.y);
        }
    }
}

// Grid: (blocks of the largest matrix, matrices). places: where each goes and how many elements its rows are apart.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
reconstruct_all(const Linear* linears, const int* which, const long long* places)
{
    const Linear linear = linears[which[blockIdx.y]];
    const int across = linear.columns / SIDE, down = blockIdx.x / across, right = blockIdx.x % across;
    if (down >= linear.rows / SIDE) return;
    Part* block = reinterpret_cast<Part*>(dynamic_shared());   // [SIDE][PITCH], then svh
    float* svh = reinterpret_cast<float*>(block + SIDE * PITCH);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if (threadIdx.x < SIDE) svh[threadIdx.x] = float_of(linear.svh[right * SIDE + threadIdx.x]);

    Part x[TALL][PARTS];
    const long long tiles = linear.columns / 16, first = (down * 8 + warp / 8 * TALL) * tiles + right * 8 + warp % 8;
    const int bits = linear.bits;
    #define STRIP(READER) strip(READER, linear.trellis + first * 8 * bits, tiles * 8 * bits, x)
    #define WIDTH(K) case K: STRIP(Stream<K>(lane)); break;
#if NARROW
    if (bits <= 4) STRIP(NarrowStream(lane, bits));
    else switch (bits) { WIDTH(5) WIDTH(6) WIDTH(7) WIDTH(8) }
#else
    switch (bits) { WIDTH(1) WIDTH(2) WIDTH(3) WIDTH(4) WIDTH(5) WIDTH(6) WIDTH(7) WIDTH(8) }
#endif
    #pragma unroll
    for (int i = 0; i < TALL; ++i)
        #pragma unroll
        for (int m = 0; m < 2; ++m)
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                Part* to = block + (16 * (warp / 8 * TALL + i) + g + 8 * h) * PITCH;
                const int column = warp % 8 * 16 + 8 * m + 2 * q;
#if PACKED
                to[column / 2] = x[i][2 * m + h];
#else
                *reinterpret_cast<float2*>(to + column) = make_float2(x[i][4 * m + 2 * h], x[i][4 * m + 2 * h + 1]);
#endif
            }
    __syncthreads();
    // The lanes of a warp: four rows and eight pairs, half of them at a time on 32 different banks.
    const int row = 4 * warp + lane / 4 % 4, pair = lane % 4 + lane / 16 * 4;
    const long long pitch = places[2 * blockIdx.y + 1];
    u16* out = reinterpret_cast<u16*>(places[2 * blockIdx.y]) + down * SIDE * pitch + right * SIDE;
    finish(block, svh, linear.suh + down * SIDE, row, pair, out, pitch);
}
