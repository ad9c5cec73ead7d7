"""Launches gpu/reconstruct.cu and gpu/matvec.cu: work on many encoded matrices in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..codebook import CODEBOOKS
from .launch import Limits, load_kernel

SIDE, THREADS, WARPS = 128, 256, 8
_LIMBS = 4 * 16 * 16  # bytes of 128 inputs' in matvec.cu


@dataclass(frozen=True)
class Reconstruction:
    """Settings of reconstruct.cu: `floats` adds up over a warp's tiles in float32 and not in halves; warps a block;
    blocks a multiprocessor; how many blocks ahead packed words are fetched into the L2 cache, 0 none."""

    floats: bool = False
    warps: int = 8
    blocks: int = 4
    ahead: int = 0

    def defines(self, codebook: str, brain: bool) -> tuple[tuple[str, int], ...]:
        return (("CODEBOOK", CODEBOOKS.index(codebook)), ("BRAIN", int(brain)), ("FLOATS", int(self.floats)),
                ("WARPS", self.warps), ("BLOCKS", self.blocks), ("AHEAD", self.ahead))  # fmt: skip

    @staticmethod
    def shared_bytes() -> int:
        return SIDE * (2 * SIDE + 16)


@dataclass(frozen=True)
class Product:
    """Settings of matvec.cu: tiles side by side in a step, blocks a multiprocessor, bytes of packed words a warp holds,
    whether shifts are shared out between units, blocks of inputs a warp can hold, sums kept apart for shorter chains,
    slabs of inputs in a unit at most."""

    columns: int = 2
    blocks: int = 3
    ring: int = 6144
    mixed: bool = True
    deepest: int = 2
    sets: int = 2
    together: int = WARPS

    def defines(self, codebook: str, experts: bool, wide: bool) -> tuple[tuple[str, int], ...]:
        return (("CODEBOOK", CODEBOOKS.index(codebook)), ("EXPERTS", int(experts)), ("WIDE", int(wide)),
                ("COLUMNS", self.columns), ("BLOCKS", self.blocks), ("RING", self.ring), ("MIXED", int(self.mixed)),
                ("DEEPEST", 1 if wide else self.deepest), ("SETS", self.sets))  # fmt: skip

    def shared_bytes(self) -> int:
        return WARPS * (self.ring + self.deepest * _LIMBS + 2 * SIDE * 4) + 1024


@dataclass(frozen=True)
class Cut:
    """How matvec.cu cuts a matrix into units: `together` slabs of `deep` blocks of inputs, times a block of outputs."""

    deep: int
    together: int

    @staticmethod
    def of(rows: int, columns: int, matrices: int, blocks: int, how: Product, wide: bool) -> "Cut":
        """The cut whose longest share of a block's is the shortest, by a warp's tiles; a unit costs some 24 besides."""

        def longest(cut: Cut) -> int:
            units = matrices * cut.slices(rows) * (columns // SIDE)
            return -(-units // blocks) * (8 * cut.deep * max(how.columns, cut.together) + 24)

        deep = [deep for deep in (2, 1) if rows // SIDE % deep == 0 and deep <= (1 if wide else how.deepest)]
        together = [t for t in (WARPS, 4, 2, 1) if t <= how.together]
        return min((Cut(d, t) for d in deep for t in together if rows // SIDE // d % t == 0), key=longest)

    def slices(self, rows: int) -> int:
        return rows // SIDE // self.deep // self.together

    def arguments(self) -> tuple[np.int32, np.int32]:
        return np.int32(self.deep), np.int32(self.together)


BFLOAT16, HALF, PRODUCT = Reconstruction(), Reconstruction(floats=True), Product()
"""The fastest on an H200; to half, whose rounding is finer, sums stay float32."""


def describe(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The table that kernels read, int64 (count, 6), of matrices given as (trellis, suh, svh) on one GPU."""
    rows = [
        [t.data_ptr(), suh.data_ptr(), svh.data_ptr(), t.shape[0] * 16, t.shape[1] * 16, t.shape[2] // 8]
        for t, suh, svh in parts
    ]
    return torch.tensor(rows).to(parts[0][0].device)


def reconstruct_into(
    table: Tensor, which: Sequence[int], outs: Sequence[Tensor], codebook: str, how: Reconstruction | None = None
) -> None:
    """Decode matrices of a table into `outs`, (k, n) each, bfloat16 or half alike, rows of unit stride."""
    device, brain = table.device.index, outs[0].dtype == torch.bfloat16
    how = how or (BFLOAT16 if brain else HALF)
    kernel = load_kernel("reconstruct.cu", "reconstruct_all", how.defines(codebook, brain), device)
    places = torch.tensor([[out.data_ptr(), out.stride(0)] for out in outs]).to(table.device, non_blocking=True)
    chosen = torch.tensor(which, dtype=torch.int32).to(table.device, non_blocking=True)
    blocks = max(out.shape[0] * out.shape[1] for out in outs) // SIDE**2
    grid = (blocks, len(outs), 1)
    kernel(grid, 32 * how.warps, how.shared_bytes(), table.data_ptr(), chosen.data_ptr(), places.data_ptr())


@lru_cache
def _counters(device: int, size: int) -> Tensor:
    """Zeros, and zeros again after every launch; a size's are kept, since a captured graph goes on using them."""
    return torch.zeros(size, dtype=torch.int32, device=f"cuda:{device}")


def counters(device: int, count: int) -> Tensor:
    """At least so many counters that are zero between launches."""
    return _counters(device, 1 << max(10, (count - 1).bit_length()))


def resident_blocks(how: Product, device: int) -> int:
    """Blocks of matvec.cu that a device runs at once; the driver keeps 1 KiB of shared memory a block."""
    limits = Limits.of(device)
    return max(1, min(how.blocks, limits.shared_total // (how.shared_bytes() + 1024))) * limits.multiprocessors


def matvec(
    table: Tensor, which: Tensor, x: Tensor, columns: int, codebook: str, how: Product | None = None, wide: bool = True
) -> Tensor:
    """x[i] W[which[i]] in float32 (count, columns); int32 (count,), float32 (count, k); all of one shape.

    wide: whether some width is over 4.
    """
    device, (count, rows), how = table.device.index, x.shape, how or PRODUCT
    blocks = resident_blocks(how, device)
    cut = Cut.of(rows, columns, count, blocks, how, wide)
    y = torch.empty(count, columns, device=x.device)
    parts = torch.empty(count * cut.slices(rows) * columns, device=x.device)
    arrived = counters(device, count * columns // SIDE)
    kernel = load_kernel("matvec.cu", "matvec", how.defines(codebook, False, wide), device)
    sizes = map(np.int32, (count, rows, columns))
    kernel(blocks, THREADS, how.shared_bytes(), table.data_ptr(), which.data_ptr(), *sizes,
           x.data_ptr(), y.data_ptr(), parts.data_ptr(), arrived.data_ptr(), *cut.arguments())  # fmt: skip
    return y


def experts(
    table: Tensor, chosen: Tensor, weights: Tensor, x: Tensor, inner: int, codebook: str, how: Product | None = None,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    """Sum over each token's experts of weight * down(silu(gate x) * up x), float32 (T, d), in one launch.

    table: gate, up and down of expert 0, then 1, ..; chosen int32 (T, k); weights float32 (T, k); x float32 (T, d);
    wide: whether some width is over 4.
    """
    device, (tokens, outer), each, how = table.device.index, x.shape, chosen.shape[1], how or PRODUCT
    pairs, blocks = tokens * each, resident_blocks(how, device)
    there = Cut.of(outer, inner, 2 * pairs, blocks, how, wide)
    back = Cut.of(inner, outer, pairs, blocks, how, wide)
    out = torch.empty_like(x)
    parts = torch.empty(pairs * (2 * there.slices(outer) * inner + back.slices(inner) * outer), device=x.device)
    zeros = counters(device, 1 + pairs + tokens * outer // SIDE)
    kernel = load_kernel("matvec.cu", "experts", how.defines(codebook, True, wide), device)
    numbers = map(np.int32, (pairs, each, outer, inner))
    kernel(blocks, THREADS, how.shared_bytes(), table.data_ptr(), chosen.data_ptr(), weights.data_ptr(), *numbers,
           x.data_ptr(), out.data_ptr(), parts.data_ptr(), zeros.data_ptr(), *there.arguments(), *back.arguments(),
           cooperative=True)  # fmt: skip
    return out
