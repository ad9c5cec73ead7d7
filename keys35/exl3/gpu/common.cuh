// What every search shares: arithmetic on packed halves, the mul1 codebook, and where tiles lie in memory. Needs no headers.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int RING = 256, HALF_RING = 128;
constexpr int LOWER = 32, LOWERINGS = RING / LOWER + 1;   // the first lowering, by nothing, included
constexpr u32 INFINITE = 0x7c00, LARGEST = 0x7fff;
constexpr float TARGET_LIMIT = 16.f;   // the codebook reaches 3.5; farther targets would only overflow

__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
    u32 r; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
__device__ __forceinline__ u32 min2(u32 a, u32 b) {   // of halves that are not negative
    u32 r;
#if __CUDA_ARCH__ >= 900
    asm("min.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#endif
    return r;
}
__device__ __forceinline__ u32 twice(u32 half) { return __byte_perm(half, half, 0x1010); }
__device__ __forceinline__ u32 smaller_half(u32 pair) { return min(pair & 0xffff, pair >> 16); }
__device__ __forceinline__ u32 half_of(float x) {
    u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r;
}
__device__ __forceinline__ float float_of(u32 half) {
    float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)half)); return r;
}

// mul1: the sum b of the bytes of state * 0x83DCD12D, read as the half 1024 + b, scaled and shifted.
__device__ __forceinline__ u32 value_of(u32 state) {
    u32 sum = __dp4a(state * 0x83DCD12Du, 0x01010101u, 0x6400u);
    return fma2(sum, 0x1eeeu, 0xc931u);   // the high half stays 0
}

// Ring position to row and column of the tile: the order in which tensor cores hold it.
__device__ __forceinline__ int row_of(int p) { return 2 * (p >> 3 & 3) + (p & 1) + 8 * (p >> 1 & 1); }
__device__ __forceinline__ int column_of(int p) { return (p >> 5) + 8 * (p >> 2 & 1); }

// Where a tile's targets are read and its results written: in ring order, 256 a tile, or in strips of 16 rows.
struct Layout {
    int columns;            // tiles side by side in a strip; 0: ring order
    int row_stride;         // elements from a row of a strip to the next
    long long strip_stride; // elements from a strip to the next
    long long states_stride;

    __device__ __forceinline__ long long first_element(int tile) const {
        return columns ? tile / columns * strip_stride + tile % columns * 16 : (long long)tile * RING;
    }
    __device__ __forceinline__ long long first_state(int tile) const {
        return columns ? tile / columns * states_stride + (long long)(tile % columns) * RING : (long long)tile * RING;
    }
    __device__ __forceinline__ int element(int p) const { return columns ? row_of(p) * row_stride + column_of(p) : p; }
};

__device__ __forceinline__ u32 target_half(float x) { return half_of(fminf(fmaxf(x, -TARGET_LIMIT), TARGET_LIMIT)); }
