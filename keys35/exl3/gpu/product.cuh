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
// packed words a warp holds), DEEPEST (the most SIDEs of inputs in a slab).

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

// limbs[slab][four rows of tiles][quarter of a tile's 16 rows][limb][which of the four]: what a lane multiplies with, in two steps.
struct Shared {
    uint4 words[WARPS][RING / 16];
    uint4 limbs[WARPS][2 * DEEPEST][4][2][4];
    float sums[2 * WARPS * SIDE];   // of the unit: [together][breadth * SIDE]
    Scale scales[WARPS];            // of the slabs
    int pieces[WARPS][6];           // in a warp's ring: the slab and, times 256, the step to the right; -1 if there was none left
    u32 taken[2];                   // pieces of the unit, and of the next
};

// How a matrix is cut: a unit has `together` slabs of `deep` * SIDE inputs, and `breadth` * SIDE outputs.
struct Cut {
    int deep, together, breadth, slices, across;
    u32 inverse;   // of together, times 2^16 and rounded up: exact for so few pieces
    __device__ __forceinline__ Cut(int rows, int columns, int deep, int together, int breadth)
        : deep(deep), together(together), breadth(breadth), slices(rows / SIDE / deep / together), across(columns / SIDE / breadth),
          inverse(65536 / together + 1) {}
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
        // Rows 4 lane .. 4 lane + 3 of the 128: a tile's fourth, half of it in each of two quadruples.
        uint4 (*to)[2][4] = &shared.limbs[slab][2 * d + lane / 16][lane % 2 * 2];
        #pragma unroll
        for (int l = 0; l < 2; ++l)
            #pragma unroll
            for (int i = 0; i < 2; ++i)
                reinterpret_cast<uint2*>(&to[i][l][lane / 4 % 4])[lane / 2 % 2] = make_uint2(limb[l][2 * i], limb[l][2 * i + 1]);
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
    // Four rows are read at once: where there is room, they start in different banks.
    static constexpr int SPREAD = ROW + (6 - ROW % 4) % 4, PITCH = 8 * DEEPEST * SPREAD * 32 <= RING ? SPREAD : ROW;
    static constexpr int PIECE = 8 * DEEPEST * PITCH, FIT = RING / 16 / PIECE;
    static constexpr int ENOUGH = 1 + 4 / DEEPEST / SIDE_BY_SIDE;   // what is under way while a piece is worked on covers its latency
    static constexpr int PLACES = FIT < ENOUGH ? FIT : ENOUGH;
    static_assert(AT_ONCE && PLACES >= 2 && PLACES <= 6, "the ring holds two pieces");

    typedef Window<H, 32> Column;

    Shared& shared;
    const Unit& unit;   // looked at anew for every piece: registers are short
    u32* taken;
    const u32* from;    // the lane's first words of the unit
    uint4* ring;
    int* pieces;

    __device__ __forceinline__ Strip(Shared& shared, const Unit& unit, u32* taken)
        : shared(shared), unit(unit), taken(taken), ring(shared.words[threadIdx.x / 32]), pieces(shared.pieces[threadIdx.x / 32]) {
        const int lane = threadIdx.x % 32, row = unit.slice * unit.cut.together * unit.cut.deep * 8 + lane / ROW;
        from = unit.linear.trellis + (long long)row * words() + unit.block * unit.cut.breadth * 32 * H + lane % ROW * 4;
    }

    __device__ __forceinline__ int words() const { return (int)unit.linear.columns / 4 * H; }   // of a row of tiles

    __device__ __forceinline__ void fetch(int place) {
        const int lane = threadIdx.x % 32, deep = unit.cut.deep, together = unit.cut.together, words = this->words();
        u32 piece = 0;
        if (lane == 0) piece = atomicAdd(taken, 1u);
        piece = __shfl_sync(0xffffffffu, piece, 0);
        const int right = piece * unit.cut.inverse >> 16, slab = piece - right * together;
        const bool any = (int)piece < together * unit.cut.breadth * (8 / SIDE_BY_SIDE);
        if (lane == 0) pieces[place] = any ? right * 256 + slab : -1;
        const u32* source = from + (long long)(slab * deep * 8) * words + right * (ROW * 4);
        uint4* to = ring + place * PIECE + lane / ROW * PITCH + lane % ROW;
        if (any && (AT_ONCE * ROW == 32 || lane < AT_ONCE * ROW))
            #pragma unroll
            for (int i = 0; i < 8 * DEEPEST / AT_ONCE; ++i)
                if (i < 8 / AT_ONCE || deep == DEEPEST)
                    copy_ahead(to + i * AT_ONCE * PITCH, source + (long long)i * (AT_ONCE * words));
        close_group();
    }

    __device__ __forceinline__ void begin() {
        #pragma unroll 1
        for (int place = 0; place < PLACES - 1; ++place) fetch(place);
    }

    // The words of a lane's column, the last first: `own` are its alone, `rest` the one before them.
    static __device__ __forceinline__ void load(u32 (&w)[Column::WORDS], const u32* own, const u32* rest) {
        constexpr int OWN = Column::WORDS - 1;
        constexpr bool ALIGNED = Column::SLACK == 0;
        w[OWN] = *rest;
        if constexpr (ALIGNED && OWN % 4 == 0)
            #pragma unroll
            for (int i = 0; i < OWN; i += 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(own + i);
                w[OWN - 1 - i] = v.x; w[OWN - 2 - i] = v.y; w[OWN - 3 - i] = v.z; w[OWN - 4 - i] = v.w;
            }
        else if constexpr (ALIGNED && OWN % 2 == 0)
            #pragma unroll
            for (int i = 0; i < OWN; i += 2) {
                const uint2 v = *reinterpret_cast<const uint2*>(own + i);
                w[OWN - 1 - i] = v.x; w[OWN - 2 - i] = v.y;
            }
        else
            #pragma unroll
            for (int i = 0; i < OWN; ++i) w[OWN - 1 - i] = own[i];
    }

    // Of column g, sums[0] and [1] get the two limbs' products, of column g + 8 [2] and [3], in lanes with q = 0.
    static __device__ __forceinline__ void multiply_tile(const Column& window, const u32 (&w)[Column::WORDS],
                                                         const uint4 (&b)[4], Sum (&sums)[4]) {
        u32 s[32];
        window.states(w, s);
        #pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = word_of(s[i]);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32* t = s + 8 * i;
            multiply(sums, t[0], t[4], t[1], t[5], b[i].x, b[i].y);
            multiply(sums, t[2], t[6], t[3], t[7], b[i].z, b[i].w);
        }
    }

    // After begin() of the same unit. Lanes of a g read a column of four tiles, one below the other.
    __device__ __forceinline__ void product() {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        const Column window(g);
        for (int place = 0;;) {
            wait_for_all_but<PLACES - 2>();
            __syncwarp();
            const int piece = pieces[place], slab = piece % 256;
            if (piece < 0) break;
            fetch(place ? place - 1 : PLACES - 1);
            const uint4* limbs = &shared.limbs[slab][0][0][g % 2][q];
            const u32* own = reinterpret_cast<const u32*>(ring + place * PIECE + q * PITCH);
            const u32* rest = own + window.at[Column::WORDS - 1];
            own += window.at[Column::WORDS - 2];
            Sum sums[SIDE_BY_SIDE][4] = {};
            #pragma unroll 1
            for (int step = 2 * unit.cut.deep; step; --step) {
                uint4 b[4];   // the limbs in columns 0 and 1, and over and over in others, whose products nobody looks at
                #pragma unroll
                for (int i = 0; i < 4; ++i) b[i] = limbs[8 * i];
                #pragma unroll
                for (int c = 0; c < SIDE_BY_SIDE; ++c) {
                    u32 w[Column::WORDS];
                    load(w, own + c * Column::TILE, rest + c * Column::TILE);
                    multiply_tile(window, w, b, sums[c]);
                }
                limbs += 32; own += 16 * PITCH; rest += 16 * PITCH;
            }
            place = place + 1 < PLACES ? place + 1 : 0;
            const Scale scale = shared.scales[slab];
            float* out = shared.sums + slab * unit.cut.breadth * SIDE + piece / 256 * (16 * SIDE_BY_SIDE) + g;
            if (q == 0)
                #pragma unroll
                for (int c = 0; c < SIDE_BY_SIDE; ++c) {
                    out[16 * c] = value(sums[c][0], sums[c][1], scale);
                    out[16 * c + 8] = value(sums[c][2], sums[c][3], scale);
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
    #define CASE(H) case H: Strip<H>(shared, unit, taken).product(); break;
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
