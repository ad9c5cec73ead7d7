"""The compiled part of the CPU's search: sixteen tiles side by side in the lanes of a vector.

Between two positions the trellis stands in a node: the stream bits that both states share. A step computes,
for every node reached, the smallest cost over its predecessors,

    cost'[j, l] = min over k of cost[k, j] + (codebook[k, j, l] - x)^2        (state = k, j, l read as bits)

and since the codebook is the same for every tile, lanes hold tiles: no shuffles, one kernel for every width,
and the arithmetic of a tile depends neither on its neighbours nor on the width of the machine's vectors (a
subtraction, one fused multiply-add and a minimum, all exactly specified). A few positions are taken together,
in groups of nodes that stay in the nearest cache, and costs are kept only between them; the way back re-derives the
choices in between by trying all chains of states: the same path. All of it is in this file, because numba's cache
looks for changes nowhere else.
"""

from collections.abc import Iterator

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..tiles import RING

LANES = 16
LOCAL_BITS = 8  # the most that positions taken together shift in
_F32 = ir.FloatType()
_VEC = ir.VectorType(_F32, LANES)


def _emit_nodes(builder: ir.IRBuilder, args: list[ir.Value], width: int, count: int | None) -> None:
    """Emit the minimum over all k for `width` neighbouring nodes; unrolled where the number of k is known."""
    costs, stride, book, number, x_address, out = args
    word = stride.type
    pointer = lambda address, kind: builder.inttoptr(address, kind.as_pointer())  # noqa: E731
    load = lambda address, kind: builder.load(pointer(address, kind), align=4)  # noqa: E731
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    x = load(x_address, _VEC)
    infinity = ir.Constant(_VEC, [float("inf")] * LANES)

    def totals(k: ir.Value) -> Iterator[ir.Value]:
        cost = load(builder.add(costs, builder.mul(k, stride)), _VEC)
        row = builder.add(book, builder.mul(k, word(4 * width)))
        for l in range(width):  # noqa: E741
            value = load(builder.add(row, word(4 * l)), _F32)
            value = builder.insert_element(ir.Constant(_VEC, ir.Undefined), value, ir.IntType(32)(0))
            value = builder.shuffle_vector(value, ir.Constant(_VEC, ir.Undefined), zeros)
            difference = builder.fsub(value, x)
            yield builder.call(fma, [difference, difference, cost])

    smaller = lambda a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b)  # noqa: E731
    if count is None:
        best = [cgutils.alloca_once_value(builder, infinity) for _ in range(width)]
        with cgutils.for_range(builder, number) as loop:
            for total, slot in zip(totals(loop.index), best, strict=True):
                builder.store(smaller(total, builder.load(slot)), slot)
        found = [builder.load(slot) for slot in best]
    else:
        found = list(totals(word(0)))
        for k in range(1, count):
            found = [smaller(total, old) for total, old in zip(totals(word(k)), found, strict=True)]
    for l, value in enumerate(found):  # noqa: E741
        builder.store(value, pointer(builder.add(out, word(4 * LANES * l)), _VEC), align=4)


def _node_kernel(width: int, count: int | None = None):  # noqa: ANN202 (a numba intrinsic has no useful type)
    @intrinsic
    def nodes(typing, costs, stride, book, count_, x, out):  # noqa: ANN001, ANN202
        def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
            _emit_nodes(builder, args, width, count)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return nodes


_nodes2, _nodes4, _nodes8, _nodes4x4 = _node_kernel(2), _node_kernel(4), _node_kernel(8), _node_kernel(4, 4)


@intrinsic
def _fma(typing, a, b, c):  # noqa: ANN001, ANN202
    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


_inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by compiled code alone: half the compile time


@_inner
def _row(node, j_bits):  # noqa: ANN001, ANN202
    """Where a node's costs lie; a spare row after every block of j spreads the k blocks over the cache."""
    return node + (node >> j_bits if j_bits >= 3 else 0)


@_inner
def _address(array):  # noqa: ANN001, ANN202
    return types.intp(array.ctypes.data)


@_inner
def _nodes(width, source, stride, book, k_count, x, target):  # noqa: ANN001, ANN202
    """`width` neighbouring nodes of sixteen tiles; all but the counts are addresses of float32 data."""
    if width == 8:
        _nodes8(source, stride, book, k_count, x, target)
    elif width == 4 and k_count == 4:
        _nodes4x4(source, stride, book, k_count, x, target)
    elif width == 4:
        _nodes4(source, stride, book, k_count, x, target)
    else:
        _nodes2(source, stride, book, k_count, x, target)


@_inner
def _block(costs, out, local, books, x, first, every, new_bits):  # noqa: ANN001, ANN202
    """`every` positions at once, from `costs` to `out`, so that both are read and written once.

    The bits that the positions shift in and out make groups of nodes that need only one another: a group's costs
    stay in `local`, in the nearest cache. In it a node is written as (bits yet to leave, bits that came).
    """
    leaving = 0
    for i in range(every):
        leaving += new_bits[(first + i + 1) % 2]
    m_bits = 16 - new_bits[first % 2] - leaving
    for m in range(1 << m_bits):
        stay, came = leaving, 0
        for i in range(every):
            l_bits, k_bits = new_bits[(first + i) % 2], new_bits[(first + i + 1) % 2]
            stay -= k_bits
            j_bits, width, k_count = 16 - k_bits - l_bits, 1 << min(l_bits, 3), 1 << k_bits
            inner, outer = i > 0, i < every - 1
            source = _address(local[i % 2]) if inner else _address(costs)
            stride = ((1 << (stay + came)) if inner else _row(1 << j_bits, j_bits)) * 4 * LANES
            target = _address(local[(i + 1) % 2]) if outer else _address(out)
            book, position = _address(books[(first + i) % 2]), _address(x[first + i])
            for t in range(1 << stay):
                node = ((t << m_bits) | m) << (came + l_bits)
                for c in range(0, 1 << (came + l_bits), width):
                    j = (t << came) | (c >> l_bits) if inner else (t << m_bits) | m
                    to = (t << (came + l_bits)) | c if outer else _row(node + c, j_bits)
                    _nodes(width, source + j * 4 * LANES, stride, book + (node + c) * k_count * 4, k_count, position,
                           target + to * 4 * LANES)
            came += l_bits


@_inner
def _forward(x, books, new_bits, every, kept, scratch, local, current, first, count, keep):  # noqa: ANN001, ANN202
    """Advance `count` positions from the costs in `current`; those before every `every`-th go to `kept`."""
    for step in range(0, count, every):
        p = (first + step) % RING
        following = (p + every) % RING
        if keep or following == 0:
            out = kept[following // every]
        elif _address(current) == _address(scratch[0]):
            out = scratch[1]
        else:
            out = scratch[0]
        _block(current, out, local, books, x, p, every, new_bits)
        current = out
    return current


@_inner
def _back(x, table, new_bits, every, kept, end, positions, states):  # noqa: ANN001, ANN202
    """Walk back from the nodes `end`: fills states[:, :positions], leaves the first nodes in `end`."""
    node_bits = 16 - new_bits[0]
    j_bits = node_bits - new_bits[1]
    chain_bits = 0
    for r in range(every):
        chain_bits += new_bits[r % 2]
    for block in range(positions // every - 1, -1, -1):
        for lane in range(LANES):
            best, best_stream = np.float32(np.inf), types.int64(0)
            for chain in range(1 << chain_bits):
                stream = (chain << node_bits) | end[lane]
                total = kept[block, _row(stream >> chain_bits, j_bits), lane]
                shift = chain_bits
                for r in range(every):
                    shift -= new_bits[r % 2]
                    difference = table[(stream >> shift) & 0xFFFF] - x[block * every + r, lane]
                    total = _fma(difference, difference, total)
                if total < best or chain == 0:
                    best, best_stream = total, stream
            shift = chain_bits
            for r in range(every):
                shift -= new_bits[r % 2]
                states[lane, block * every + r] = (best_stream >> shift) & 0xFFFF
            end[lane] = best_stream >> chain_bits


@_inner
def _cheapest(costs, node_bits, j_bits, end):  # noqa: ANN001, ANN202
    best = costs[0].copy()
    end[:] = 0
    for node in range(1 << node_bits):
        row = _row(node, j_bits)
        for lane in range(LANES):
            if costs[row, lane] < best[lane]:
                best[lane] = costs[row, lane]
                end[lane] = node


@njit(cache=True, nogil=True)
def encode_ring(x, books, table, new_bits, every, kept, scratch, local, states):  # noqa: ANN001, ANN202
    """Encode sixteen rings: x is (256, lanes), states (lanes, 256)."""
    node_bits = 16 - new_bits[0]
    j_bits = node_bits - new_bits[1]
    end = np.zeros(LANES, np.int64)
    # first pass: from the middle, all nodes open; its best path says in which node the ring closes
    half = RING // 2
    scratch[0][:] = 0
    costs = _forward(x, books, new_bits, every, kept, scratch, local, scratch[0], half, half, 0)
    costs = _forward(x, books, new_bits, every, kept, scratch, local, costs, 0, half, 1)
    _cheapest(costs, node_bits, j_bits, end)
    _back(x, table, new_bits, every, kept, end, half, states)
    # second pass: start and end in that node
    kept[0][:] = np.inf
    for lane in range(LANES):
        kept[0, _row(end[lane], j_bits), lane] = 0
    _forward(x, books, new_bits, every, kept, scratch, local, kept[0], 0, RING - every, 1)
    _back(x, table, new_bits, every, kept, end, RING, states)
