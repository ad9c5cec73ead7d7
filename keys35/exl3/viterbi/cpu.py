"""Tail-biting Viterbi search on the CPU: sixteen tiles side by side in the lanes of a vector.

Between two positions the trellis stands in a node: the stream bits that both states share. A step computes,
for every node reached, the smallest cost over its predecessors,

    cost'[j, l] = min over k of cost[k, j] + (codebook[k, j, l] - x)^2        (state = k, j, l read as bits)

and since the codebook is the same for every tile, lanes hold tiles: no shuffles, one kernel for every width,
and the arithmetic of a tile depends neither on its neighbours nor on the width of the machine's vectors (a
subtraction, one fused multiply-add and a minimum, all exactly specified). Costs are kept only every few
positions; the way back re-derives the choices in between by trying all chains of states: the same path.
"""

import threading
from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from ..codebook import codebook_table
from ..tiles import RING, symbol_bits

LANES = 16
_F32 = ir.FloatType()
_VEC = ir.VectorType(_F32, LANES)


def _emit_nodes(builder: ir.IRBuilder, args: list[ir.Value], width: int) -> None:
    """Emit the minimum over all k for `width` neighbouring nodes."""
    costs, stride, book, count, x_address, out = args
    word = count.type
    pointer = lambda address, kind: builder.inttoptr(address, kind.as_pointer())  # noqa: E731
    load = lambda address, kind: builder.load(pointer(address, kind), align=4)  # noqa: E731
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    x = load(x_address, _VEC)
    infinity = ir.Constant(_VEC, [float("inf")] * LANES)
    best = [cgutils.alloca_once_value(builder, infinity) for _ in range(width)]
    with cgutils.for_range(builder, count) as loop:
        cost = load(builder.add(costs, builder.mul(loop.index, stride)), _VEC)
        row = builder.add(book, builder.mul(loop.index, word(4 * width)))
        for l, slot in enumerate(best):  # noqa: E741
            value = load(builder.add(row, word(4 * l)), _F32)
            value = builder.insert_element(ir.Constant(_VEC, ir.Undefined), value, ir.IntType(32)(0))
            value = builder.shuffle_vector(value, ir.Constant(_VEC, ir.Undefined), zeros)
            difference = builder.fsub(value, x)
            total = builder.call(fma, [difference, difference, cost])
            old = builder.load(slot)
            builder.store(builder.select(builder.fcmp_ordered("<", total, old), total, old), slot)
    for l, slot in enumerate(best):  # noqa: E741
        builder.store(builder.load(slot), pointer(builder.add(out, word(4 * LANES * l)), _VEC), align=4)


def _node_kernel(width: int):  # noqa: ANN202 (a numba intrinsic has no useful type)
    @intrinsic
    def nodes(typing, costs, stride, book, count, x, out):  # noqa: ANN001, ANN202
        def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
            _emit_nodes(builder, args, width)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return nodes


_nodes2, _nodes4, _nodes8 = _node_kernel(2), _node_kernel(4), _node_kernel(8)


@intrinsic
def _fma(typing, a, b, c):  # noqa: ANN001, ANN202
    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit
def _row(node, j_bits):  # noqa: ANN001, ANN202
    """Where a node's costs lie; a spare row after every block of j spreads the k blocks over the cache."""
    return node + (node >> j_bits if j_bits >= 3 else 0)


@njit
def _address(array):  # noqa: ANN001, ANN202
    return types.intp(array.ctypes.data)


@njit
def _step(costs, out, book, x, k_bits, j_bits, l_bits):  # noqa: ANN001, ANN202
    """One position of sixteen tiles; all but the bit counts are addresses of float32 data."""
    width = 1 << min(l_bits, 3)
    k_count = 1 << k_bits
    stride = _row(1 << j_bits, j_bits) * 4 * LANES
    for first in range(0, 1 << (j_bits + l_bits), width):
        source = costs + (first >> l_bits) * 4 * LANES
        target = out + _row(first, j_bits) * 4 * LANES
        entry = book + first * k_count * 4
        if width == 8:
            _nodes8(source, stride, entry, k_count, x, target)
        elif width == 4:
            _nodes4(source, stride, entry, k_count, x, target)
        else:
            _nodes2(source, stride, entry, k_count, x, target)


@njit
def _forward(x, books, new_bits, every, kept, scratch, current, first, count, keep):  # noqa: ANN001, ANN202
    """Advance `count` positions from the costs in `current`; those before every `every`-th go to `kept`."""
    for step in range(count):
        p = (first + step) % RING
        l_bits, k_bits = new_bits[p % 2], new_bits[(p + 1) % 2]
        following = (p + 1) % RING
        if following % every == 0 and (keep or following == 0):
            out = kept[following // every]
        elif _address(current) == _address(scratch[0]):
            out = scratch[1]
        else:
            out = scratch[0]
        book = _address(books[p % 2])
        _step(_address(current), _address(out), book, _address(x[p]), k_bits, 16 - k_bits - l_bits, l_bits)
        current = out
    return current


@njit
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


@njit
def _cheapest(costs, node_bits, j_bits, end):  # noqa: ANN001, ANN202
    best = costs[0].copy()
    end[:] = 0
    for node in range(1 << node_bits):
        row = _row(node, j_bits)
        for lane in range(LANES):
            if costs[row, lane] < best[lane]:
                best[lane] = costs[row, lane]
                end[lane] = node


@njit
def _ring(x, books, table, new_bits, every, kept, scratch, states):  # noqa: ANN001, ANN202
    """Encode sixteen rings: x is (256, lanes), states (lanes, 256)."""
    node_bits = 16 - new_bits[0]
    j_bits = node_bits - new_bits[1]
    end = np.zeros(LANES, np.int64)
    half = RING // 2
    # first pass: from the middle, all nodes open; its best path says in which node the ring closes
    scratch[0][:] = 0
    costs = _forward(x, books, new_bits, every, kept, scratch, scratch[0], half, RING, True)
    _cheapest(costs, node_bits, j_bits, end)
    _back(x, table, new_bits, every, kept, end, half, states)
    # second pass: start and end in that node
    kept[0][:] = np.inf
    for lane in range(LANES):
        kept[0, _row(end[lane], j_bits), lane] = 0
    _forward(x, books, new_bits, every, kept, scratch, kept[0], 0, RING - every, True)
    _back(x, table, new_bits, every, kept, end, RING, states)


@njit(parallel=True, cache=True, nogil=True)
def _encode(x, books, table, new_bits, every, kept, scratch, states):  # noqa: ANN001, ANN202
    for worker in prange(kept.shape[0]):
        for group in range(worker, x.shape[0], kept.shape[0]):
            _ring(x[group], books, table, new_bits, every, kept[worker], scratch[worker], states[group])


_EVERY = {1.0: 8, 1.5: 4, 2.0: 4, 2.5: 2, 3.0: 2, 3.5: 2, 4.0: 1}
"""How many positions apart costs are kept, per width; 1 above 4 bits."""


@dataclass(frozen=True)
class _Layout:
    new_bits: np.ndarray
    every: int
    rows: int
    books: tuple[np.ndarray, np.ndarray]
    table: np.ndarray


def _aligned(*shape: int) -> np.ndarray:
    """Uninitialised float32 memory on cache-line boundaries."""
    return torch.empty(shape, dtype=torch.float32).numpy()


def _book(table: Tensor, k_bits: int, l_bits: int) -> np.ndarray:
    """The codebook in the order a step reads it: block of nodes, k, node in the block."""
    width = 1 << min(l_bits, 3)
    return table.view(1 << k_bits, -1, width).transpose(0, 1).flatten().numpy()


@lru_cache
def _layout(bits: float, codebook: str) -> _Layout:
    even, odd = symbol_bits(bits)[:2]
    table = codebook_table(codebook)
    j_bits = 16 - even - odd
    rows = max((1 << k) * ((1 << j_bits) + (j_bits >= 3)) for k in (even, odd))
    books = (_book(table, odd, even), _book(table, even, odd))
    return _Layout(np.array([even, odd]), _EVERY.get(bits, 1), rows, books, table.numpy())


class CpuBackend:
    """The numba backend; deterministic per tile, whatever the batch, its order or the number of threads."""

    name = "cpu"

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the work memory is shared by all calls
        self._work: tuple[tuple[int, ...], np.ndarray, np.ndarray] | None = None

    def _work_memory(self, workers: int, slots: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (workers, slots, rows)
        if self._work is None or self._work[0] != shape:
            self._work = None
            self._work = (shape, _aligned(workers, slots, rows, LANES), _aligned(workers, 2, rows, LANES))
        return self._work[1:]

    def encode_tiles(self, tiles: Tensor, bits: float, codebook: str = "mul1") -> Tensor:
        """Find for every tile the tail-biting path of least squared error.

        Shapes: float32 (T, 256) in ring order, at the codebook's scale; uint16 states (T, 256).
        """
        layout = _layout(float(bits), codebook)
        count = tiles.shape[0]
        groups = -(-count // LANES)
        x = torch.zeros(groups * LANES, RING)
        x[:count] = tiles
        lanes = x.view(groups, LANES, RING).transpose(1, 2).contiguous().numpy()
        states = np.empty((groups, LANES, RING), np.uint16)
        with self._lock:
            workers = numba.get_num_threads()
            kept, scratch = self._work_memory(workers, RING // layout.every, layout.rows)
            _encode(lanes, layout.books, layout.table, layout.new_bits, layout.every, kept, scratch, states)
        return torch.from_numpy(states).view(-1, RING)[:count]
