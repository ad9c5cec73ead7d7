// Many encoded matrices to bfloat16 or half in one launch, at the speed of memory. Each may have its own width.
//
// A block makes 128 x 128 weights. H128 is H8 over tiles times H16 inside a tile, and so on either side. A warp decodes four
// tiles below each other, a lane's weights of one as a fragment for tensor cores, which do both H16; additions do the H4 over
// the four. The halves then go through shared memory, and tensor cores do what is left, H8 over the tiles side by side and H2
// over the two fours below each other, as one H16, with the rows' scales in it. Products are summed in float32.
// Defines: CODEBOOK, BRAIN (output bfloat16, else half), FLOATS (the H4 in float32, else in halves: its errors stay near
// bfloat16's rounding), WARPS, BLOCKS (a multiprocessor), AHEAD (blocks; the words of the one so far on are fetched into L2).

#include "stream.cuh"

constexpr int SIDE = 128, TALL = 4;      // tiles a warp decodes at a time
constexpr int PITCH = 2 * SIDE + 16;     // bytes of a row in shared memory
#if FLOATS
typedef float Part;
constexpr int PARTS = 8;
__device__ __forceinline__ Part add(Part a, Part b) { return a + b; }
__device__ __forceinline__ Part sub(Part a, Part b) { return a - b; }
#else
typedef u32 Part;    // two neighbours in a row, as halves
constexpr int PARTS = 4;
__device__ __forceinline__ Part add(Part a, Part b) { return add2(a, b); }
__device__ __forceinline__ Part sub(Part a, Part b) { return sub2(a, b); }
#endif

constexpr u32 MINUS = 0x80008000u;   // turns the signs of two halves

// H16 / 8 at (g, 2q) and (g, 2q + 1), as halves. So it is in three quarters of H16; in the last the signs are turned.
__device__ __forceinline__ u32 hadamard_pair() {
    const int g = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    return (0x3000u | (__popc(g & column) & 1) << 15) | (0x3000u | (__popc(g & (column + 1)) & 1) << 15) << 16;
}

// H16 W H16 / 64 of a tile given as the lane's four pairs of values. Rows g and g + 8, of the left half, then of the right.
__device__ __forceinline__ void rotate_tile(const u32 (&b)[4], u32 h, float (&d)[2][4]) {
    float left[4] = {}, right[4] = {};
    mma_half(left, h, h, h, h ^ MINUS, b[0], b[1]);
    mma_half(right, h, h, h, h ^ MINUS, b[2], b[3]);
    const u32 a[4] = {pack_half(left[0], left[1]), pack_half(left[2], left[3]),
                      pack_half(right[0], right[1]), pack_half(right[2], right[3])};
    #pragma unroll
    for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int p = 0; p < 4; ++p) d[m][p] = 0.f;
        mma_half(d[m], a[0], a[1], a[2], a[3], h, m ? h ^ MINUS : h);
    }
}

// Four tiles below each other, decoded and rotated but for what crosses to other warps' tiles.
template <int H>
__device__ __forceinline__ void strip(const u32* trellis, int row_words, u32 h, Part (&x)[TALL][PARTS]) {
    typedef Window<H, 8> Eight;
    const Eight window(threadIdx.x % 32);
    const u32* from[Eight::WORDS];
    #pragma unroll
    for (int j = 0; j < Eight::WORDS; ++j) from[j] = trellis + window.at[j];
    u32 words[TALL][Eight::WORDS];
    #pragma unroll
    for (int i = 0; i < TALL; ++i) {
        if (i == 0 || (H > 8 && i == TALL / 2))   // all under way at once, if they are not too many
            #pragma unroll
            for (int k = i; k < (H > 8 ? i + TALL / 2 : TALL); ++k)
                #pragma unroll
                for (int j = 0; j < Eight::WORDS; ++j, from[j - 1] += row_words) words[k][j] = load_once(from[j]);
        u32 s[8], b[4];
        window.states(words[i], s);
        #pragma unroll
        for (int j = 0; j < 4; ++j) b[j] = values_of(s[2 * j], s[2 * j + 1]);
        float d[2][4];
        rotate_tile(b, h, d);
        #pragma unroll
        for (int p = 0; p < PARTS; ++p)
#if FLOATS
            x[i][p] = d[p / 4][p % 4];
#else
            x[i][p] = pack_half(d[p / 2][p % 2 * 2], d[p / 2][p % 2 * 2 + 1]);
#endif
    }
    #pragma unroll
    for (int half = 1; half < TALL; half *= 2)
        #pragma unroll
        for (int i = 0; i < TALL; ++i)
            if (!(i & half))
                #pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    const Part low = x[i][p], high = x[i + half][p];
                    x[i][p] = add(low, high);
                    x[i + half][p] = sub(low, high);
                }
}

// A strip's halves to shared memory. A row holds first the pairs 0, 2, 4, 6 of all its tiles, then 1, 3, 5, 7.
__device__ __forceinline__ void lay_down(const Part (&x)[TALL][PARTS], char* block, int below, int beside) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    char* to = block + (16 * TALL * below + g) * PITCH + q % 2 * SIDE + beside * 16 + q / 2 * 4;
    #pragma unroll
    for (int i = 0; i < TALL; ++i)
        #pragma unroll
        for (int m = 0; m < 2; ++m)
            #pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<u32*>(to + (16 * i + 8 * r) * PITCH + 8 * m) =
#if FLOATS
                    pack_half(x[i][4 * m + 2 * r], x[i][4 * m + 2 * r + 1]);
#else
                    x[i][2 * m + r];
#endif
}

__device__ __forceinline__ u32 pack_output(float low, float high) {
#if BRAIN
    return pack_brain(low, high);
#else
    return pack_half(low, high);
#endif
}

// Rows `first` .. first + 3 and those 64 below: two at a time are one product with an H16 of (upper or lower, tile), whose rows
// take their scale. A lane gets four neighbours of tile g in either row.
__device__ __forceinline__ void finish(const char* block, const u16* suh, const float (&svh)[4], u16* out, long long pitch, int first) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 sign = hadamard_pair() & MINUS;
    const uint2 above = *reinterpret_cast<const uint2*>(suh + first), below = *reinterpret_cast<const uint2*>(suh + first + SIDE / 2);
    const char* row = block + (first + lane / 8 % 2 * (SIDE / 2)) * PITCH + lane / 16 * SIDE + lane % 8 * 16;
    out += first * pitch + 16 * g + 4 * q;
    u16* lower = out + SIDE / 2 * pitch;
    #pragma unroll
    for (int i = 0; i < 4; ++i, out += pitch, lower += pitch) {
        const u32 twice = i % 2 ? 0x3232 : 0x1010;
        const u32 a = __byte_perm(i < 2 ? above.x : above.y, 0, twice) ^ sign, c = __byte_perm(i < 2 ? below.x : below.y, 0, twice) ^ sign;
        u32 b[4];
        load_transposed(b, row + i * PITCH);
        float left[4] = {}, right[4] = {};
        mma_half(left, a, c, a, c ^ MINUS, b[0], b[1]);
        mma_half(right, a, c, a, c ^ MINUS, b[2], b[3]);
        store_away(out, make_uint2(pack_output(left[0] * svh[0], left[1] * svh[1]), pack_output(right[0] * svh[2], right[1] * svh[3])));
        store_away(lower, make_uint2(pack_output(left[2] * svh[0], left[3] * svh[1]), pack_output(right[2] * svh[2], right[3] * svh[3])));
    }
}

// The packed words of a block, one of a matrix's; false where it has fewer.
__device__ __forceinline__ bool announce(const Linear& linear, long long block) {
    const long long across = linear.columns / SIDE, down = block / across, right = block % across;
    if (down >= linear.rows / SIDE) return false;
    const int line = 32 * linear.half_bits / 32, lane = threadIdx.x % 32;   // of 128 bytes, in a row of eight tiles
    for (int i = lane; i < 8 * line; i += 32)
        will_read(linear.trellis + ((down * 8 + i / line) * (linear.columns / 16) + right * 8) * 4 * linear.half_bits + i % line * 32);
    return true;
}

// Grid: (blocks of the largest matrix, matrices). places: where each goes and how many elements its rows are apart.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
reconstruct_all(const Linear* linears, const int* which, const long long* places)
{
    const Linear& linear = linears[which[blockIdx.y]];   // looked up again after the decoding, when registers are free
    const int across = linear.columns / SIDE, down = blockIdx.x / across, right = blockIdx.x % across;
    if (down >= linear.rows / SIDE) return;
    char* block = dynamic_shared();   // [SIDE][PITCH]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;

#if AHEAD
    if (warp == 0) {
        const long long on = blockIdx.x + AHEAD, blocks = linear.rows / SIDE * across;
        if (!announce(linear, on) && blockIdx.y + 1 < gridDim.y) announce(linears[which[blockIdx.y + 1]], on - blocks);
    }
#endif
    const u32 h = hadamard_pair();
    #pragma unroll 1
    for (int part = warp; part < 16; part += WARPS) {
        Part x[TALL][PARTS];
        const long long tiles = linear.columns / 16, first = (down * 8 + part / 8 * TALL) * tiles + right * 8 + part % 8;
        #define CASE(H) case H: strip<H>(linear.trellis + first * 4 * H, tiles * 4 * H, h, x); break;
        switch (linear.half_bits) {
            CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(10) CASE(12) CASE(14) CASE(16)
        }
        lay_down(x, block, part / 8, part % 8);
    }
    const uint2 scales = *reinterpret_cast<const uint2*>(linear.svh + right * SIDE + 16 * g + 4 * q);
    const float svh[4] = {0.5f * float_of(scales.x), 0.5f * float_of(scales.x >> 16),   // 1 / 128 with both H16 / 8
                          0.5f * float_of(scales.y), 0.5f * float_of(scales.y >> 16)};
    const long long pitch = places[2 * blockIdx.y + 1];
    u16* out = reinterpret_cast<u16*>(places[2 * blockIdx.y]) + down * SIDE * pitch + right * SIDE;
    __syncthreads();
    for (int first = 4 * warp; first < SIDE / 2; first += 4 * WARPS)
        finish(block, linear.suh + down * SIDE, svh, out, pitch, first);
}
