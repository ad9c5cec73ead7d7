// A vector times an encoded matrix, straight from the trellis, and how a grid shares many of these.
//
// Work is cut into units: `together` slabs of inputs (SIDE * deep each) times `breadth` * SIDE outputs. A warp scales and
// rotates a slab of the vector, cuts it into two limbs, and keeps them in shared memory the way tensor cores want them: a
// weight's word is four bytes (mul1) or two halves that add up to its value, so each limb stands there four times or twice,
// and the product with the word adds them up. The word itself, fresh from its hash, is the other operand. mul1: 16-bit
// integers, sums exact in int32; mcg and 3inst: pairs of halves, sums float32. Then warps take pieces of the unit, COLUMNS tiles
// side by side and a slab deep, whoever is free the next: a multiprocessor prefers some warps to others, and shares fixed
// ahead would leave the last ones to finish alone. Packed words come by asynchronous copies, a piece ahead, the next unit's
// before this one's sums are put away. Whoever puts away the last part of 128 outputs adds them all up, in a fixed order, so
// results repeat to the last bit. Against the codebook's definition a value lacks its rounding to a half (about 1e-4).
// Defines: CODEBOOK, WIDE (widths over 4, too), WARPS (of a block), COLUMNS (tiles a warp takes side by side), RING (bytes of
// packed words a warp holds), DEEPEST (the most SIDEs of inputs in a slab), SETS (1 or 2 sums for a tile, added up at the end:
// shorter chains).

#include "stream.cuh"

constexpr int SIDE = 128, THREADS = 32 * WARPS;
constexpr float ROOT = 0.08838834764831845f;   // 1 / sqrt(128)

#if CODEBOOK == 0
typedef int Sum;
#else
typedef float Sum;
#endif

// What turns integer sums into outputs.
struct Scale { float unit, offset; };

// limbs[slab][pair of tiles][half][limb][lane % 4]: the limb of half of a lane's eight rows of the two tiles.
struct Shared {
    uint4 words[WARPS][RING / 16];
    uint4 limbs[WARPS][4 * DEEPEST][2][2][4];
    float sums[2 * WARPS * SIDE];   // of the unit: [together][breadth * SIDE]
    Scale scales[WARPS];            // of the slabs
    int pieces[WARPS][6];           // in a warp's ring: the slab and, times 256, the step to the right; -1 if there was none left
    u32 taken[2];                   // pieces of the unit, and of the next
};

// How a matrix is cut: a unit has `together` slabs of `deep` * SIDE inputs, and `breadth` * SIDE outputs.
struct Cut {
    int deep, together, breadth, slices, across;
    __device__ __forceinline__ Cut(int rows, int columns, int deep, int together, int breadth)
        : deep(deep), together(together), breadth(breadth), slices(rows / SIDE / deep / together), across(columns / SIDE / breadth) {}
    __device__ __forceinline__ int units() const { return slices * across; }
};

struct Unit {
    Linear linear;
    float* parts;      // of the matrix: [slices][columns]
    float weight;      // of its outputs
    int slice, block;  // of inputs and of outputs
    int owner;         // what the kernel knows it by
    Cut cut;
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

// The unit's slab with the warp's number: rotated inputs as limbs.
template <class Work> __device__ __forceinline__ void prepare(Shared& shared, const Work& work, const Unit& unit) {
    const int deep = unit.cut.deep, lane = threadIdx.x % 32, slab = threadIdx.x / 32;
    const int row = (unit.slice * unit.cut.together + slab) * deep * SIDE + 4 * lane;
    float y[DEEPEST][4], reach = 0.f;
    float4 scaled[DEEPEST];   // all loads first
    #pragma unroll
    for (int d = 0; d < DEEPEST; ++d)
        if (d < deep) scaled[d] = times(work.inputs(unit, row + d * SIDE), unit.linear.suh + row + d * SIDE);
    #pragma unroll
    for (int d = 0; d < DEEPEST; ++d) {
        if (d >= deep) break;
        const float4 v = rotate(scaled[d]);
        y[d][0] = v.x; y[d][1] = v.y; y[d][2] = v.z; y[d][3] = v.w;
        #pragma unroll
        for (int i = 0; i < 4; ++i) reach = fmaxf(reach, fabsf(y[d][i]));
    }
    #pragma unroll
    for (int by = 16; by; by /= 2) reach = fmaxf(reach, __shfl_xor_sync(0xffffffffu, reach, by));
    const float step = reach > 0.f ? reach / 32512.f : 1.f, inverse = 1.f / step;
    int total = 0;
    #pragma unroll
    for (int d = 0; d < DEEPEST; ++d) {
        if (d >= deep) break;
        u32 limb[2][4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scaled = y[d][i] * inverse;
#if CODEBOOK == 0
            const int whole = __float2int_rn(scaled), upper = whole + 128 >> 8;
            total += whole;
            limb[0][i] = (upper & 0xff) * 0x01010101u;
            limb[1][i] = (whole - upper * 256 & 0xff) * 0x01010101u;
#else
            limb[0][i] = pack_half(scaled, scaled);
            const float rest = scaled - float_of(limb[0][i]);
            limb[1][i] = pack_half(rest, rest);
#endif
        }
        // Rows 4 lane .. 4 lane + 3 of the 128: a tile's fourth, half of it in each of a reader's two quadruples.
        const int pair = 4 * d + lane / 8, q = lane / 4 % 2 * 2 + lane % 2, half = lane / 2 % 2;
        #pragma unroll
        for (int l = 0; l < 2; ++l)
            #pragma unroll
            for (int i = 0; i < 2; ++i)
                reinterpret_cast<uint2*>(&shared.limbs[slab][pair][i][l][q])[half] = make_uint2(limb[l][2 * i], limb[l][2 * i + 1]);
    }
    #pragma unroll
    for (int by = 16; by; by /= 2) total += __shfl_xor_sync(0xffffffffu, total, by);
    if (lane) return;
#if CODEBOOK == 0
    shared.scales[slab] = {step * STEP, step * FLOOR * total};
#else
    shared.scales[slab] = {step, 0.f};
#endif
}

__device__ __forceinline__ void multiply(Sum (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if CODEBOOK == 0
    mma_bytes(d, a0, a1, a2, a3, b0, b1);
#else
    mma_half(d, a0, a1, a2, a3, b0, b1);
#endif
}

__device__ __forceinline__ float value(Sum high, Sum low, Scale scale) {
#if CODEBOOK == 0
    return scale.unit * (256.f * high + low) + scale.offset;
#else
    return scale.unit * (high + low);
#endif
}

// A warp's pieces of a unit: SIDE_BY_SIDE tiles side by side, as deep as the slab. Packed words come through a ring.
template <int H> struct Strip {
    static constexpr int SIDE_BY_SIDE = 2 * DEEPEST * COLUMNS * 128 * H <= RING ? COLUMNS : 1;
    static constexpr int ROW = SIDE_BY_SIDE * H;   // 16 bytes each
    static constexpr int AT_ONCE = ROW > 32 ? 0 : 32 / ROW >= 8 ? 8 : 32 / ROW >= 4 ? 4 : 32 / ROW >= 2 ? 2 : 1;   // rows a copy takes
    static constexpr int PIECE = 8 * DEEPEST * ROW, FIT = RING / 16 / PIECE;
    static constexpr int ENOUGH = 1 + 4 / DEEPEST / SIDE_BY_SIDE;   // what is under way while a piece is worked on covers its latency
    static constexpr int PLACES = FIT < ENOUGH ? FIT : ENOUGH;
    static_assert(AT_ONCE && PLACES >= 2 && PLACES <= 6, "the ring holds two pieces");

    typedef Window<H, 16> Sixteen;

    uint4* ring;
    int* pieces;
    u32* taken;
    const u32* from;          // the lane's first words of the unit
    int words, deep, together, count;   // words: of a row of tiles; count: pieces
    u32 inverse;              // of together, times 2^16 and rounded up: exact for so few pieces

    __device__ __forceinline__ Strip(Shared& shared, const Unit& unit, u32* taken)
        : ring(shared.words[threadIdx.x / 32]), pieces(shared.pieces[threadIdx.x / 32]), taken(taken),
          words(unit.linear.columns / 4 * H), deep(unit.cut.deep), together(unit.cut.together),
          count(unit.cut.together * unit.cut.breadth * (8 / SIDE_BY_SIDE)), inverse(65536 / unit.cut.together + 1) {
        const int lane = threadIdx.x % 32;
        from = unit.linear.trellis + (long long)(unit.slice * together * deep * 8 + lane / ROW) * words
            + unit.block * unit.cut.breadth * 32 * H + lane % ROW * 4;
    }

    __device__ __forceinline__ void fetch(int place) {
        const int lane = threadIdx.x % 32;
        u32 piece = 0;
        if (lane == 0) piece = atomicAdd(taken, 1u);
        piece = __shfl_sync(0xffffffffu, piece, 0);
        const int right = piece * inverse >> 16, slab = piece - right * together;
        const bool any = (int)piece < count;
        if (lane == 0) pieces[place] = any ? right * 256 + slab : -1;
        const u32* source = from + (long long)(slab * deep * 8) * words + right * (ROW * 4);
        if (any && (AT_ONCE * ROW == 32 || lane < AT_ONCE * ROW))
            #pragma unroll
            for (int i = 0; i < 8 * DEEPEST / AT_ONCE; ++i)
                if (i < 8 / AT_ONCE || deep == DEEPEST)
                    copy_ahead(ring + place * PIECE + i * AT_ONCE * ROW + lane, source + (long long)i * (AT_ONCE * words));
        close_group();
    }

    __device__ __forceinline__ void begin() {
        #pragma unroll 1
        for (int place = 0; place < PLACES - 1; ++place) fetch(place);
    }

    // Eight rows of tiles. Of column g, sums[c][0] and [1] get the two limbs' products, of column g + 8 [2] and [3], in lanes with q = 0.
    // b and d are zero in lanes whose columns of the limbs are.
    static __device__ __forceinline__ void multiply_rows(const Sixteen& window, const u32* const (&words)[Sixteen::WORDS],
                                                         const uint4* limbs, uint4& b, uint4& d, Sum (&sums)[SIDE_BY_SIDE][SETS][4]) {
        #pragma unroll
        for (int p = 0; p < 4; ++p) {
            if (threadIdx.x % 32 < 8) {
                b = limbs[16 * p];
                d = limbs[16 * p + 8];
            }
            #pragma unroll
            for (int c = 0; c < SIDE_BY_SIDE; ++c) {
                u32 w[Sixteen::WORDS], s[16];
                #pragma unroll
                for (int j = 0; j < Sixteen::WORDS; ++j) w[j] = words[j][p * 8 * ROW + c * Sixteen::TILE];
                window.states(w, s);
                #pragma unroll
                for (int i = 0; i < 16; ++i) s[i] = word_of(s[i]);
                multiply(sums[c][0], s[0], s[4], s[1], s[5], b.x, b.y);
                multiply(sums[c][SETS - 1], s[2], s[6], s[3], s[7], b.z, b.w);
                multiply(sums[c][0], s[8], s[12], s[9], s[13], d.x, d.y);
                multiply(sums[c][SETS - 1], s[10], s[14], s[11], s[15], d.z, d.w);
            }
        }
    }

    // After begin() of the same unit.
    __device__ __forceinline__ void product(Shared& shared, int breadth) {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        uint4 b = make_uint4(0, 0, 0, 0), d = b;
        const Sixteen window(2 * g + q % 2);
        for (int place = 0;;) {
            wait_for_all_but<PLACES - 2>();
            __syncwarp();
            const int piece = pieces[place], slab = piece % 256;
            if (piece < 0) break;
            fetch(place ? place - 1 : PLACES - 1);
            const uint4* limbs = &shared.limbs[slab][0][0][g % 2][q];
            Sum sums[SIDE_BY_SIDE][SETS][4] = {};
            const u32* words[Sixteen::WORDS];   // of a pair's tile that is the lane's
            #pragma unroll
            for (int j = 0; j < Sixteen::WORDS; ++j)
                words[j] = reinterpret_cast<const u32*>(ring + place * PIECE + q / 2 * ROW) + window.at[j];
            #pragma unroll 1
            for (int below = 0; below < deep; ++below) {
                multiply_rows(window, words, limbs + below * 64, b, d, sums);
                #pragma unroll
                for (int j = 0; j < Sixteen::WORDS; ++j) words[j] += 32 * ROW;
            }
            place = place + 1 < PLACES ? place + 1 : 0;
            const Scale scale = shared.scales[slab];
            float* out = shared.sums + slab * breadth * SIDE + piece / 256 * (16 * SIDE_BY_SIDE) + g;
            if (q == 0)
                #pragma unroll
                for (int c = 0; c < SIDE_BY_SIDE; ++c)
                    #pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        Sum high = sums[c][0][2 * h], low = sums[c][0][2 * h + 1];
                        if (SETS > 1) { high += sums[c][SETS - 1][2 * h]; low += sums[c][SETS - 1][2 * h + 1]; }
                        out[16 * c + 8 * h] = value(high, low, scale);
                    }
        }
        wait_for_all_but<0>();
        __syncwarp();
    }
};

#if WIDE
#define EVERY_WIDTH(CASE) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(10) CASE(12) CASE(14) CASE(16)
#else
#define EVERY_WIDTH(CASE) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif

// Packed words on their way to shared memory, scales to the L2 cache.
__device__ __forceinline__ void begin(Shared& shared, const Unit& unit, u32* taken) {
    #define CASE(H) case H: Strip<H>(shared, unit, taken).begin(); break;
    switch (unit.linear.half_bits) { EVERY_WIDTH(CASE) }
    #undef CASE
    const int warp = threadIdx.x / 32, place = threadIdx.x % 32 * 4, slab = unit.cut.deep * SIDE;
    if (warp < unit.cut.together)
        for (int i = place; i < slab; i += SIDE) will_read(unit.linear.suh + (unit.slice * unit.cut.together + warp) * slab + i);
    if (warp < unit.cut.breadth) will_read(unit.linear.svh + (unit.block * unit.cut.breadth + warp) * SIDE + place);
}

__device__ __forceinline__ void product(Shared& shared, const Unit& unit, u32* taken) {
    #define CASE(H) case H: Strip<H>(shared, unit, taken).product(shared, unit.cut.breadth); break;
    switch (unit.linear.half_bits) { EVERY_WIDTH(CASE) }
    #undef CASE
}

// The warp's SIDE of a unit's outputs, the slabs' sums added up in order, rotated back and scaled, to its parts.
__device__ __forceinline__ void put_away(const Shared& shared, const Unit& unit, int block) {
    const int place = 4 * (threadIdx.x % 32), at = block * SIDE + place;
    const float* sums = shared.sums + threadIdx.x / 32 * SIDE + place;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    #pragma unroll 4
    for (int s = 0; s < unit.cut.together; ++s) {
        const float4 v = *reinterpret_cast<const float4*>(sums + s * unit.cut.breadth * SIDE);
        y.x += v.x; y.y += v.y; y.z += v.z; y.w += v.w;
    }
    y = times(rotate(y), unit.linear.svh + at);
    *reinterpret_cast<float4*>(unit.parts + unit.slice * unit.linear.columns + at) =
        make_float4(unit.weight * y.x, unit.weight * y.y, unit.weight * y.z, unit.weight * y.w);
}

// Whether a warp's is the last of so many arrivals; what the others wrote before theirs can be read then.
__device__ __forceinline__ bool is_last(u32* arrived, int of) {
    __syncwarp();
    u32 last = 0;
    if (threadIdx.x % 32 == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1u) == of - 1;
        if (last) *arrived = 0;   // for the next launch
        __threadfence();
    }
    return __shfl_sync(0xffffffffu, last, 0);
}

// Four outputs' parts, `stride` apart, added up in order.
__device__ __forceinline__ float4 sum_of_parts(const float* parts, long long stride, int count) {
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s = 0; s < count; s += 8) {   // eight loads under way
        float4 v[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = s + i < count ? load_fresh(parts + (s + i) * stride) : make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int i = 0; i < 8; ++i) { y.x += v[i].x; y.y += v[i].y; y.z += v[i].z; y.w += v[i].w; }
    }
    return y;
}

// Runs a block's share of units: every so many. Work has count, unit(n), ready(unit), inputs(unit, row) and
// finish(unit, block of outputs), and lies in shared memory, as units do: the next ones are looked up while there is time.
template <class Work> struct Everything { Shared shared; Work work; Unit units[4]; };

template <class Work> __device__ __forceinline__ void run(Everything<Work>& all) {
    const int warp = threadIdx.x / 32;
    Shared& shared = all.shared;
    const Work& work = all.work;
    if (threadIdx.x % 32 == 0 && warp < min(2, work.count)) all.units[warp] = work.unit(warp);
    if (threadIdx.x < 2) shared.taken[threadIdx.x] = 0;
    __syncthreads();
    if (!work.count) return;
    begin(shared, all.units[0], &shared.taken[0]);
    for (int n = 0; n < work.count; ++n) {
        const Unit& unit = all.units[n % 4];
        u32 *taken = &shared.taken[n % 2], *next = &shared.taken[(n + 1) % 2];
        if (threadIdx.x == 0) *next = 0;
        if (warp < unit.cut.together) {
            work.ready(unit);
            prepare(shared, work, unit);
        }
        __syncthreads();
        if (threadIdx.x == 0 && n + 2 < work.count) all.units[(n + 2) % 4] = work.unit(n + 2);
        product(shared, unit, taken);
        if (n + 1 < work.count) begin(shared, all.units[(n + 1) % 4], next);
        __syncthreads();
        if (warp >= unit.cut.breadth) continue;
        const int block = unit.block * unit.cut.breadth + warp;
        put_away(shared, unit, block);
        work.finish(unit, block);
    }
}

__device__ __forceinline__ int share_of(int units) { return (units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x; }
