// Reading a trellis: the states that a lane owns in a tile (format notes 1.4 to 1.6), and what a codebook makes of them.
// H is twice the width, so that half rates are whole: a position's state ends its number of later positions times H / 2
// bits, rounded up, before the end of the lane's window, since odd positions take the longer symbol.
// CODEBOOK: 0 mul1, 1 mcg, 2 3inst.
//
// Eight positions of the ring are what a tensor-core fragment wants from a lane: rows 2q, 2q+1, 2q+8, 2q+9 of column g, then
// of column g + 8, where g = lane / 4 and q = lane % 4. Thirty-two are those of the four lanes of a g.

#include "ptx.cuh"

// One encoded matrix (inputs x outputs); a table of these describes a layer.
struct Linear {
    const u32* trellis;
    const u16* suh;
    const u16* svh;
    long long rows, columns, half_bits;   // twice the bits a weight
};

#ifndef MIXED
#define MIXED 0
#endif
template <int H, int POSITIONS> struct Window {
    static constexpr int TILE = 4 * H;   // words of a tile
    static constexpr int GRAIN = POSITIONS / 2 * H % 32;   // where windows end in a word, modulo 32: multiples of this
    static constexpr int SLACK = GRAIN == 0 ? 0 : GRAIN % 16 == 0 ? 16 : GRAIN % 8 == 0 ? 24 : 28;
    static constexpr int WORDS = (SLACK + ((POSITIONS - 1) * H + 1) / 2 + 16 + 31) / 32;

    int at[WORDS], shift;   // its words, the last first, and the bits behind it in the last

    __device__ __forceinline__ explicit Window(int number) {
        const int end = POSITIONS / 2 * H * (number + 1), last = (end - 1) / 32;
        shift = -end & 31;
        #pragma unroll
        for (int i = 0; i < WORDS; ++i) at[i] = last >= i ? last - i : last - i + TILE;
    }

    // 16 bits of a word, `bit` <= 16 places from its end. Places that differ by 8 share the shift. MIXED: by 2, 3, 5, 6 and 7 it
    // goes to the left instead, which the compiler makes a multiplication: another unit does those.
    static __device__ __forceinline__ u32 field(u32 word, int bit) {
        if (MIXED && bit < 16 && 0xec >> bit % 8 & 1) return __byte_perm(word << 8 - bit % 8, 0, 0x4421 + 0x11 * (bit >> 3));
        return __byte_perm(word >> (bit & 7), 0, 0x4410 + 0x11 * (bit >> 3));
    }

    __device__ __forceinline__ void states(const u32 (&w)[WORDS], u32 (&s)[POSITIONS]) const {
        u32 whole[WORDS];   // every 32 bits from the window's end
        #pragma unroll
        for (int k = 0; k < WORDS; ++k)
            whole[k] = SLACK == 0 ? w[k] : k + 1 < WORDS ? __funnelshift_r(w[k], w[k + 1], shift) : w[k] >> shift;
        #pragma unroll
        for (int i = 0; i < POSITIONS; ++i) {
            const int bit = ((POSITIONS - 1 - i) * H + 1) / 2, k = bit / 32;
            if (bit % 32 <= 16) s[i] = field(whole[k], bit % 32);
            else s[i] = field(__funnelshift_r(whole[k], whole[k + 1 < WORDS ? k + 1 : k], 16), bit % 32 - 16);
        }
    }
};

// A state's word: its four bytes (mul1) or its two halves (mcg, 3inst) add up to its value.
__device__ __forceinline__ u32 word_of(u32 state) {
#if CODEBOOK == 0
    return state * 0x83DCD12Du;
#elif CODEBOOK == 1
    return (state * 0xCBAC1FEDu & 0x8fff8fffu) ^ 0x3b603b60u;
#else
    return (state * 89226354u + 64248484u & 0x8fff8fffu) ^ 0x3b603b60u;
#endif
}

// mul1: a byte sum b means b * STEP + FLOOR, which the codebook rounds to a half.
constexpr float STEP = 0.00676727294921875f, FLOOR = 1024 * STEP - 10.3828125f;

// The values of two states as a pair of halves.
__device__ __forceinline__ u32 values_of(u32 first, u32 second) {
    const u32 x = word_of(first), y = word_of(second);
#if CODEBOOK == 0
    const u32 sums = __byte_perm(__dp4a(x, 0x01010101u, 0x6400u), __dp4a(y, 0x01010101u, 0x6400u), 0x5410);
    return fma2(sums, 0x1eee1eeeu, 0xc931c931u);
#else
    return add2(__byte_perm(x, y, 0x5410), __byte_perm(x, y, 0x7632));
#endif
}
