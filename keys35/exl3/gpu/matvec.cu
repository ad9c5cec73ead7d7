// Vectors times encoded matrices, straight from the trellis: one linear after another, or a layer's chosen experts whole.
//
// No grid-wide waits: a down product waits for its own expert's gate and up, and whoever is the last to put away a part of 128
// outputs adds the parts up.
// Defines: EXPERTS (which of the two kernels), BLOCKS (a multiprocessor), and those of product.cuh.

#include "product.cuh"

#if !EXPERTS
struct Products {
    const Linear* linears;
    const int* which;
    const float* x;
    float *y, *parts;
    u32* arrived;
    int rows, columns, count;
    Cut cut;

    __device__ __forceinline__ Unit unit(int n) const {
        const int index = n * gridDim.x + blockIdx.x, i = index / cut.units(), within = index % cut.units();
        float* to = cut.slices == 1 ? y : parts;   // the only part is the result
        return {linears[which[i]], to + (long long)i * cut.slices * columns, 1.f, within / cut.across, within % cut.across, i, cut};
    }
    __device__ __forceinline__ void ready(const Unit&) const {}
    __device__ __forceinline__ float4 inputs(const Unit& unit, int row) const {
        return load_fresh(x + (long long)unit.owner * rows + row);
    }
    __device__ __forceinline__ void finish(const Unit& unit, int block) const {
        if (cut.slices == 1 || !is_last(arrived + unit.owner * (columns / SIDE) + block, cut.slices)) return;
        const int place = block * SIDE + 4 * (threadIdx.x % 32);
        *reinterpret_cast<float4*>(y + (long long)unit.owner * columns + place) = sum_of_parts(unit.parts + place, columns, cut.slices);
    }
};

// y[i] = x[i] W[which[i]], float32, for matrices of one shape. parts: [count][slices][columns]; arrived: zeros, and again.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
matvec(const Linear* linears, const int* which, int count, int rows, int columns, const float* x, float* y, float* parts,
       u32* arrived, int deep, int together, int breadth)
{
    auto& all = *reinterpret_cast<Everything<Products>*>(dynamic_shared());
    const Cut cut(rows, columns, deep, together, breadth);
    if (threadIdx.x == 0) all.work = {linears, which, x, y, parts, arrived, rows, columns, share_of(count * cut.units()), cut};
    __syncthreads();
    run(all);
}
#else
struct Experts {
    const Linear* linears;
    const int* chosen;
    const float *weights, *x;
    float *out, *parts, *more_parts;
    u32 *made, *arrived;   // parts of 128 outputs of gate and up that are there, of a pair; of 128 outputs of a token
    int pairs, each, outer, inner, first, count;   // first: its units of gate and up
    Cut in, back;

    __device__ __forceinline__ Unit unit(int n) const {
        if (n < first) {
            const int index = n * gridDim.x + blockIdx.x, matrix = index / in.units(), within = index % in.units();
            return {linears[3 * chosen[matrix / 2] + matrix % 2], parts + (long long)matrix * in.slices * inner, 1.f,
                    within / in.across, within % in.across, matrix, in};
        }
        const int index = (n - first) * gridDim.x + blockIdx.x, pair = index / back.units(), within = index % back.units();
        return {linears[3 * chosen[pair] + 2], more_parts + (long long)pair * back.slices * outer, weights[pair],
                within / back.across, within % back.across, 2 * pairs + pair, back};
    }
    // A down product waits for its pair's gate and up.
    __device__ __forceinline__ void ready(const Unit& unit) const {
        if (unit.owner < 2 * pairs) return;
        if (threadIdx.x % 32 == 0)
            while (load_shared_by_all(made + unit.owner - 2 * pairs) != 2 * in.slices * (inner / SIDE)) {}
        __syncwarp();
    }
    __device__ __forceinline__ float4 inputs(const Unit& unit, int row) const {
        if (unit.owner < 2 * pairs) return load_fresh(x + (long long)(unit.owner / 2 / each) * outer + row);
        const float* of = parts + (long long)(unit.owner - 2 * pairs) * 2 * in.slices * inner + row;
        const float4 g = sum_of_parts(of, inner, in.slices), u = sum_of_parts(of + (long long)in.slices * inner, inner, in.slices);
        return make_float4(g.x / (1.f + expf(-g.x)) * u.x, g.y / (1.f + expf(-g.y)) * u.y,
                           g.z / (1.f + expf(-g.z)) * u.z, g.w / (1.f + expf(-g.w)) * u.w);
    }
    __device__ __forceinline__ void finish(const Unit& unit, int block) const {
        if (unit.owner < 2 * pairs) {
            __syncwarp();
            if (threadIdx.x % 32) return;
            __threadfence();
            atomicAdd(made + unit.owner / 2, 1u);
            return;
        }
        const int token = (unit.owner - 2 * pairs) / each, place = block * SIDE + 4 * (threadIdx.x % 32);
        if (!is_last(arrived + token * (outer / SIDE) + block, each * back.slices)) return;
        *reinterpret_cast<float4*>(out + (long long)token * outer + place) =
            sum_of_parts(more_parts + (long long)token * each * back.slices * outer + place, outer, each * back.slices);
    }
};

// out[t] = sum over the token's pairs of weight * down(silu(gate x) * up x). Pairs (token, expert) lie token by token,
// `each` of them a token; linears[3 e + 0, 1, 2] are gate, up and down of expert e. Every expert may have its own width.
// parts: [pairs][2][slices][inner], then [pairs][slices][outer]; counters: zeros, and again, for 1, pairs and
// tokens * outer / 128. A cooperative launch: blocks wait for each other.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
experts(const Linear* linears, const int* chosen, const float* weights, int pairs, int each, int outer, int inner,
        const float* x, float* out, float* parts, u32* counters, int deep_in, int together_in, int breadth_in,
        int deep_out, int together_out, int breadth_out)
{
    auto& all = *reinterpret_cast<Everything<Experts>*>(dynamic_shared());
    const Cut in(outer, inner, deep_in, together_in, breadth_in), back(inner, outer, deep_out, together_out, breadth_out);
    if (threadIdx.x == 0) {
        const int first = share_of(2 * pairs * in.units());
        all.work = {linears, chosen, weights, x, out, parts, parts + (long long)pairs * 2 * in.slices * inner, counters + 1,
                    counters + 1 + pairs, pairs, each, outer, inner, first, first + share_of(pairs * back.units()), in, back};
    }
    __syncthreads();
    run(all);
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(counters, 1u) != gridDim.x - 1) return;
    for (int i = 0; i <= pairs; ++i) counters[i] = 0;   // nobody waits any more
}
#endif
