// Reading a trellis: the eight states that a lane owns in every tile (format notes 1.4 and 1.5), and what a codebook
// makes of them. K is the width in whole bits a weight. CODEBOOK: 0 mul1, 1 mcg, 2 3inst.
//
// A lane's eight ring positions are consecutive and are the weights that a tensor-core fragment wants from it:
// rows 2q, 2q+1, 2q+8, 2q+9 of column g, then of column g + 8, where g = lane / 4 and q = lane % 4.

#include "ptx.cuh"

// One encoded matrix (inputs x outputs); a table of these describes a layer.
struct Linear {
    const u32* trellis;
    const u16* suh;
    const u16* svh;
    long long rows, columns, bits;
};

#ifndef MIXED
#define MIXED 0
#endif
// In memory, so that the compiler does not turn the multiplications back into shifts.
__constant__ u32 POWER[17] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};

template <int K> struct Stream {
    static constexpr int TILE = 8 * K;              // words of a tile
    static constexpr int WORDS = K <= 4 ? 2 : 3;    // that a lane's 7K + 16 bits may touch

    int at[WORDS], shift;   // its words, the last first, and the bits behind its own in the last

    __device__ __forceinline__ explicit Stream(int lane) {
        const int end = 8 * (lane + 1) * K, last = (end - 1) / 32;
        shift = (32 - end % 32) % 32;
        #pragma unroll
        for (int i = 0; i < WORDS; ++i) at[i] = last >= i ? last - i : last - i + TILE;
    }

    // 16 bits of a word, `bit` <= 16 places from its end. Places that differ by 8 share the shift; where none do (odd
    // widths), every other field is cut out by a multiplication, which another unit does.
    static __device__ __forceinline__ u32 field(u32 word, int bit) {
        if (MIXED && K == 3 && bit % 2 && bit < 16) return word * POWER[16 - bit] >> 16;
        return __byte_perm(word >> (bit & 7), 0, 0x4410 + 0x11 * (bit >> 3));
    }

    // A window of bits is cut into words that begin every 16 bits, counted from its end; a state lies inside one of them.
    __device__ __forceinline__ void states(const u32 (&w)[WORDS], u32 (&s)[8]) const {
        if constexpr (WORDS == 2) {
            constexpr int REACH = K > 2 ? 7 * K - 16 : 0;   // two words do: the window's end, and its begin
            const u32 end = __funnelshift_r(w[0], w[1], shift), begin = __funnelshift_r(w[0], w[1], shift + REACH);
            #pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int bit = (7 - j) * K;
                s[j] = bit <= 16 ? field(end, bit) : field(begin, bit - REACH);
            }
        } else {
            const u32 first = __funnelshift_r(w[0], w[1], shift), third = __funnelshift_r(w[1], w[2], shift);
            const u32 fifth = w[2] >> shift;
            const u32 cut[5] = {first, __funnelshift_r(first, third, 16), third, __funnelshift_r(third, fifth, 16), fifth};
            #pragma unroll
            for (int j = 0; j < 8; ++j) s[j] = field(cut[(7 - j) * K / 16], (7 - j) * K % 16);
        }
    }
};

// The same for any width up to 4, known only when it runs.
struct NarrowStream {
    static constexpr int WORDS = 2;

    int at[2], shift, width, reach;

    __device__ __forceinline__ NarrowStream(int lane, int bits) : width(bits), reach(bits > 2 ? 7 * bits - 16 : 0) {
        const int end = 8 * (lane + 1) * bits, last = (end - 1) / 32;
        shift = -end & 31;
        at[0] = last;
        at[1] = last ? last - 1 : 8 * bits - 1;
    }

    __device__ __forceinline__ void states(const u32 (&w)[2], u32 (&s)[8]) const {
        const u32 end = __funnelshift_r(w[0], w[1], shift), begin = __funnelshift_r(w[0], w[1], shift + reach);
        #pragma unroll
        for (int j = 0; j < 8; ++j) s[j] = (j < 3 ? begin >> (7 - j) * width - reach : end >> (7 - j) * width) & 0xffff;
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
