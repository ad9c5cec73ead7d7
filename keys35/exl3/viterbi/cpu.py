"""Tail-biting Viterbi search on the CPU: what the compiled search works on, and how it is spread over threads."""

import math
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np
import torch
from torch import Tensor

from ..codebook import codebook_table
from ..tiles import RING, symbol_bits
from .search import LANES, LOCAL_BITS, encode_ring

HUGE_PAGE = 2 << 20

_EVERY = {1.0: 8, 1.5: 4, 2.0: 4, 2.5: 2, 3.0: 2, 3.5: 2, 4.0: 1}
"""How many positions apart costs are kept, per width; 1 above 4 bits."""


@dataclass(frozen=True)
class _Layout:
    new_bits: np.ndarray
    every: int
    rows: int
    books: tuple[np.ndarray, np.ndarray]
    table: np.ndarray


def _memory(*shape: int) -> np.ndarray:
    """Float32 memory in huge pages where there are any: the way back jumps through tens of megabytes."""
    size = 4 * math.prod(shape)
    region = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may be built without them
            region.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(region, np.uint8)
    start = -found.ctypes.data % HUGE_PAGE
    return found[start : start + size].view(np.float32).reshape(shape)


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
        self._work: tuple[tuple[int, ...], tuple[np.ndarray, ...]] | None = None

    def _work_memory(self, workers: int, slots: int, rows: int) -> tuple[np.ndarray, ...]:
        shape = (workers, slots, rows)
        if self._work is None or self._work[0] != shape:
            self._work = None
            sizes = (slots, rows), (2, rows), (2, 1 << LOCAL_BITS)
            self._work = (shape, tuple(_memory(workers, *size, LANES) for size in sizes))
        return self._work[1]

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
            memory = self._work_memory(workers, RING // layout.every, layout.rows)

            def work(worker: int) -> None:
                own = [part[worker] for part in memory]
                for x, found in zip(lanes[worker::workers], states[worker::workers], strict=True):
                    encode_ring(x, layout.books, layout.table, layout.new_bits, layout.every, *own, found)

            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, range(workers)))
        return torch.from_numpy(states).view(-1, RING)[:count]
