// Enough of CUDA to run a kernel on a CPU: every thread is a fibre, and whoever waits yields to the next one.
// Warp-wide operations (shuffles, tensor cores) let the lanes lay down their operands and wait for each other.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>
#include <ucontext.h>

typedef unsigned int u32;
typedef unsigned short u16;
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;
struct Index { unsigned x = 0, y = 0, z = 0; };

struct Meeting { unsigned arrived = 0, round = 0; };
struct Warp { Meeting meeting; u32 laid[32][8]; };
struct Block { Meeting meeting; std::vector<char> shared; std::vector<Warp> warps; };
struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Index thread, block;
    Block* home = nullptr;
    bool done = false;
};

static ucontext_t scheduler;
static Fibre* now;
static Index grid_size, block_size;
static const std::function<void()>* body;

#define threadIdx (now->thread)
#define blockIdx (now->block)
#define gridDim grid_size
#define blockDim block_size
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __constant__ static
#define __launch_bounds__(...)

inline void yield() { swapcontext(&now->context, &scheduler); }
inline void wait_for(Meeting& meeting, unsigned count) {
    const unsigned round = meeting.round;
    if (++meeting.arrived == count) { meeting.arrived = 0; ++meeting.round; }
    else while (meeting.round == round) yield();
}
inline Warp& warp() { return now->home->warps[threadIdx.x / 32]; }
inline void warp_waits() { wait_for(warp().meeting, 32); }
inline void __syncthreads() { wait_for(now->home->meeting, block_size.x); }
inline void __syncwarp() { warp_waits(); }
inline void __threadfence() {}
inline u32 atomicAdd(u32* p, u32 v) { const u32 before = *p; *p += v; return before; }

inline float __shfl_xor_sync(u32, float x, int step) {
    const u32 lane = threadIdx.x % 32;
    memcpy(warp().laid[lane], &x, 4);
    warp_waits();
    memcpy(&x, warp().laid[lane ^ step], 4);
    warp_waits();
    return x;
}
inline int __shfl_xor_sync(u32 mask, int x, int step) {
    float y; memcpy(&y, &x, 4); y = __shfl_xor_sync(mask, y, step); memcpy(&x, &y, 4); return x;
}
inline u32 __shfl_sync(u32, u32 x, int from) {
    warp().laid[threadIdx.x % 32][0] = x;
    warp_waits();
    x = warp().laid[from][0];
    warp_waits();
    return x;
}
inline u32 __byte_perm(u32 a, u32 b, u32 pick) {
    const uint64_t both = (uint64_t)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)(both >> 8 * (pick >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}
inline u32 __funnelshift_r(u32 low, u32 high, int by) { return ((uint64_t)high << 32 | low) >> (by & 31); }
inline u32 __dp4a(u32 a, u32 b, u32 c) { for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255); return c; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }

// ptx.cuh, in C++.
inline char* dynamic_shared() { return now->home->shared.data(); }
inline float float_of(u32 half) { _Float16 h; const u16 bits = half; memcpy(&h, &bits, 2); return (float)h; }
inline u32 half_of(float x) { const _Float16 h = (_Float16)x; u16 bits; memcpy(&bits, &h, 2); return bits; }
inline u32 pack_half(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline u32 brain_of(float x) { u32 b; memcpy(&b, &x, 4); return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
inline u32 pack_brain(float low, float high) { return brain_of(low) | brain_of(high) << 16; }
inline u32 add2(u32 a, u32 b) { return pack_half(float_of(a) + float_of(b), float_of(a >> 16) + float_of(b >> 16)); }
inline u32 sub2(u32 a, u32 b) { return add2(a, b ^ 0x80008000u); }
inline u32 fma2(u32 a, u32 b, u32 c) {   // in double: one rounding of what is exact there
    auto one = [](u32 x, u32 y, u32 z) {
        const _Float16 h = (_Float16)((double)float_of(x) * float_of(y) + float_of(z)); u16 bits; memcpy(&bits, &h, 2); return (u32)bits;
    };
    return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
inline u32 load_once(const u32* p) { return *p; }
inline u32 load_shared_by_all(const u32* p) { yield(); return *p; }
inline float4 load_fresh(const float* p) { return *reinterpret_cast<const float4*>(p); }
inline void copy_ahead(void* to, const void* from) { memcpy(to, from, 16); }
inline void close_group() {}
template <int OPEN> inline void wait_for_all_but() {}
inline void store_away(void* p, uint2 v) { memcpy(p, &v, 8); }
inline void will_read(const void*) {}
inline void load_transposed(u32 (&b)[4], const void* row) {
    const u32 lane = threadIdx.x % 32;
    memcpy(warp().laid[lane], &row, sizeof row);
    warp_waits();
    for (int i = 0; i < 4; ++i) {
        u16 halves[2];
        for (int k = 0; k < 2; ++k) {
            const u16* from;
            memcpy(&from, warp().laid[8 * i + lane % 4 * 2 + k], sizeof from);
            halves[k] = from[lane / 4];
        }
        memcpy(&b[i], halves, 4);
    }
    warp_waits();
}

// Everyone's operands, then each lane's four sums: PER values a word, `value` reads them.
template <int PER, class T, class A, class B> void mma(T (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, A of_a, B of_b) {
    const u32 lane = threadIdx.x % 32, mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(warp().laid[lane], mine, sizeof mine);
    warp_waits();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        T sum = 0;
        for (int k = 0; k < 8 * PER; ++k) {
            const int q = k / PER % 4, upper = k / PER / 4, part = k % PER;
            const u32 a = warp().laid[row % 8 * 4 + q][row / 8 + 2 * upper], b = warp().laid[column * 4 + q][4 + upper];
            sum += (T)of_a(a, part) * (T)of_b(b, part);
        }
        d[i] += sum;
    }
    warp_waits();
}
inline void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    auto half = [](u32 x, int i) { return float_of(x >> 16 * i); };
    mma<2>(d, a0, a1, a2, a3, b0, b1, half, half);
}
inline void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma<4>(d, a0, a1, a2, a3, b0, b1, [](u32 x, int i) { return (int)(x >> 8 * i & 255); },
           [](u32 x, int i) { return (int)(int8_t)(x >> 8 * i & 255); });
}

static void begin() { (*body)(); now->done = true; swapcontext(&now->context, &scheduler); }

// Runs all blocks of a grid at once, so that they can wait for each other.
inline void run(Index grid, unsigned threads, size_t shared, const std::function<void()>& kernel) {
    grid_size = grid; block_size = {threads, 1, 1}; body = &kernel;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Fibre>> fibres;
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
            blocks.push_back(std::make_unique<Block>());
            blocks.back()->shared.resize(shared + 16);
            blocks.back()->warps.resize(threads / 32);
            for (unsigned t = 0; t < threads; ++t) {
                auto fibre = std::make_unique<Fibre>();
                fibre->stack.reset(new char[32 << 10]);
                fibre->thread.x = t; fibre->block.x = x; fibre->block.y = y; fibre->home = blocks.back().get();
                getcontext(&fibre->context);
                fibre->context.uc_stack.ss_sp = fibre->stack.get();
                fibre->context.uc_stack.ss_size = 32 << 10;
                fibre->context.uc_link = &scheduler;
                makecontext(&fibre->context, begin, 0);
                fibres.push_back(std::move(fibre));
            }
        }
    for (bool any = true; any;) {
        any = false;
        for (auto& fibre : fibres)
            if (!fibre->done) { any = true; now = fibre.get(); swapcontext(&scheduler, &now->context); }
    }
}
