// Hadamard rotations of 128 x 128 blocks, and the decoding of a trellis into such blocks, in one pass over memory.
//
// The butterflies are those of hadamard.py, in the same order, so the results are the same to the last bit: sums and
// differences of neighbours 1, 2, 4, .. 64 apart, then one multiplication by 1 / sqrt(128).
// A block of 128 threads holds a block of the matrix in shared memory; a thread transforms a column, then a row.

#include "common.cuh"

constexpr int SIDE = 128, PITCH = SIDE + 1, TILES = SIDE / 16;   // the pitch keeps rows and columns off each other's banks

template <int STRIDE> __device__ __forceinline__ void butterflies(float* first) {
    float x[SIDE];
    #pragma unroll
    for (int i = 0; i < SIDE; ++i) x[i] = first[i * STRIDE];
    #pragma unroll
    for (int half = 1; half < SIDE; half *= 2)
        #pragma unroll
        for (int i = 0; i < SIDE; ++i)
            if (!(i & half)) {
                float low = x[i], high = x[i + half];
                x[i] = low + high;
                x[i + half] = low - high;
            }
    #pragma unroll
    for (int i = 0; i < SIDE; ++i) first[i * STRIDE] = x[i] * 0.08838834764831845f;
}

// Rotates the inputs (rows of the matrix run over inputs), then the outputs, as asked. A grid of (columns, rows, matrices).
extern "C" __global__ void __launch_bounds__(SIDE)
rotate(const float* in, float* out, long long rows, long long columns, int inputs, int outputs)
{
    extern __shared__ float block[];   // [SIDE][PITCH]
    const int t = threadIdx.x;
    const long long corner = (blockIdx.z * rows + blockIdx.y * SIDE) * columns + blockIdx.x * SIDE;
    #pragma unroll 8
    for (int r = 0; r < SIDE; ++r) block[r * PITCH + t] = in[corner + r * columns + t];
    if (inputs) butterflies<PITCH>(block + t);   // a thread's own column: no wait
    if (outputs) {
        __syncthreads();
        butterflies<1>(block + t * PITCH);
        __syncthreads();
    }
    #pragma unroll 8
    for (int r = 0; r < SIDE; ++r) out[corner + r * columns + t] = block[r * PITCH + t];
}

struct Float { typedef float type; static __device__ type of(float x) { return x; } };
struct Half { typedef u16 type; static __device__ type of(float x) { return half_of(x); } };
struct Brain {
    typedef u16 type;
    static __device__ type of(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
};

// Where the 16 stream bits that end with position p begin; at HALF, odd positions add a bit more (format notes 1.5 and 1.6).
__device__ __forceinline__ int first_bit(int p, int whole, int half) {
    const int end = (p + 1) * whole + (p + 1) / 2 * half;
    return end >= 16 ? end - 16 : end - 16 + RING * whole + RING / 2 * half;
}

// The packed words of a block's tiles go to shared memory; a thread then reads two positions of every tile.
template <class As> __device__ __forceinline__ void
reconstruct(const u32* trellis, const u16* suh, const u16* svh, typename As::type* out, int columns, int whole, int half)
{
    extern __shared__ float block[];   // [SIDE][PITCH], then the packed words
    u32* words = reinterpret_cast<u32*>(block + SIDE * PITCH);
    const int t = threadIdx.x, tile_words = 8 * whole + 4 * half, row_words = TILES * tile_words;
    for (int i = t; i < TILES * row_words; i += SIDE) {
        const long long tile = (blockIdx.y * TILES + i / row_words) * (long long)(columns / 16) + blockIdx.x * TILES;
        words[i] = trellis[tile * tile_words + i % row_words];
    }
    __syncthreads();
    #pragma unroll
    for (int p = t; p < RING; p += SIDE) {
        const int bit = first_bit(p, whole, half), word = bit / 32, after = word + 1 == tile_words ? 0 : word + 1;
        float* place = block + row_of(p) * PITCH + column_of(p);
        #pragma unroll 8
        for (int tile = 0; tile < TILES * TILES; ++tile) {
            const u32* from = words + tile * tile_words;
            const u32 state = __funnelshift_l(from[after], from[word], bit % 32) >> 16;
            place[tile / TILES * 16 * PITCH + tile % TILES * 16] = float_of(value_of(state));
        }
    }
    __syncthreads();
    if (suh) {   // without scales: the values as they are
        butterflies<PITCH>(block + t);
        __syncthreads();
        butterflies<1>(block + t * PITCH);
        __syncthreads();
    }
    const float scale_out = suh ? float_of(svh[blockIdx.x * SIDE + t]) : 1.f;
    #pragma unroll 8
    for (int r = 0; r < SIDE; ++r) {
        const long long row = blockIdx.y * SIDE + r;
        const float scale_in = suh ? float_of(suh[row]) : 1.f;
        out[row * columns + blockIdx.x * SIDE + t] = As::of(scale_in * block[r * PITCH + t] * scale_out);
    }
}

#define RECONSTRUCT(NAME, AS) \
    extern "C" __global__ void __launch_bounds__(SIDE) NAME(const u32* trellis, const u16* suh, const u16* svh, \
                                                            AS::type* out, int columns, int whole, int half) \
    { reconstruct<AS>(trellis, suh, svh, out, columns, whole, half); }
RECONSTRUCT(reconstruct_float32, Float)
RECONSTRUCT(reconstruct_float16, Half)
RECONSTRUCT(reconstruct_bfloat16, Brain)
