"""Launches gpu/reconstruct.cu and gpu/matvec.cu: work on many encoded matrices in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..codebook import CODEBOOKS
from .launch import Limits, load_kernel

SIDE = 128
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
    """Settings of matvec.cu: tiles side by side in a piece, warps a block, blocks a multiprocessor, bytes of packed
    words a warp holds, whether shifts are shared out between units, blocks of inputs in a slab at most."""

    columns: int = 2
    warps: int = 24
    blocks: int = 1
    ring: int = 6144
    mixed: bool = True
    deepest: int = 2

    def defines(self, codebook: str, experts: bool, wide: bool) -> tuple[tuple[str, int], ...]:
        return (("CODEBOOK", CODEBOOKS.index(codebook)), ("EXPERTS", int(experts)), ("WIDE", int(wide)),
                ("COLUMNS", self.columns), ("WARPS", self.warps), ("BLOCKS", self.blocks), ("RING", self.ring),
                ("MIXED", int(self.mixed)), ("DEEPEST", 1 if wide else self.deepest))  # fmt: skip

    def shared_bytes(self) -> int:
        return self.warps * (self.ring + self.deepest * _LIMBS + 2 * SIDE * 4 + 32) + 1024

    def fitting(self, shared: int) -> "Product":
        """With no more warps a block than so many bytes of shared memory allow."""
        fewer = [replace(self, warps=warps) for warps in (self.warps, 16, 8, 4) if warps <= self.warps]
        return next(how for how in fewer if how.shared_bytes() <= shared)


@dataclass(frozen=True)
class Cut:
    """How matvec.cu cuts a matrix into units: `together` slabs of `deep` blocks of inputs, times `breadth` blocks of
    outputs."""

    deep: int
    together: int
    breadth: int

    @staticmethod
    @lru_cache
    def of(rows: int, columns: int, matrices: int, blocks: int, how: Product, wide: bool) -> "Cut":
        """The cut whose longest share of a block's is the shortest, by a warp's tiles; a unit costs some 40 besides."""

        def longest(cut: Cut) -> int:
            units = matrices * cut.slices(rows) * (columns // SIDE // cut.breadth)
            pieces = cut.together * cut.breadth * (8 // how.columns)
            return -(-units // blocks) * (-(-pieces // how.warps) * 8 * cut.deep * how.columns + 40)

        deep = [deep for deep in (2, 1) if rows // SIDE % deep == 0 and deep <= (1 if wide else how.deepest)]
        cuts = [
            Cut(d, together, breadth)
            for d in deep
            for together in _divisors(rows // SIDE // d, how.warps)
            for breadth in _divisors(columns // SIDE, min(how.warps, 2 * how.warps // together))
        ]
        return min(cuts, key=longest)

    def slices(self, rows: int) -> int:
        return rows // SIDE // self.deep // self.together

    def arguments(self) -> tuple[np.int32, np.int32, np.int32]:
        return np.int32(self.deep), np.int32(self.together), np.int32(self.breadth)


def _divisors(number: int, most: int) -> list[int]:
    """Of a number, the largest first."""
    return [n for n in range(min(number, most), 0, -1) if number % n == 0]


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


@lru_cache
def on_device(how: Product, device: int) -> tuple[Product, int]:
    """Settings that fit a device, and the blocks of matvec.cu that it runs at once; of shared memory the driver keeps
    1 KiB a block."""
    limits = Limits.of(device)
    how = how.fitting(limits.shared_bytes)
    return how, max(1, min(how.blocks, limits.shared_total // (how.shared_bytes() + 1024))) * limits.multiprocessors


def matvec(
    table: Tensor, which: Tensor, x: Tensor, columns: int, codebook: str, how: Product | None = None, wide: bool = True
) -> Tensor:
    """x[i] W[which[i]] in float32 (count, columns); int32 (count,), float32 (count, k); all of one shape.

    wide: whether some width is over 4.
    """
    device, (count, rows) = table.device.index, x.shape
    how, blocks = on_device(how or PRODUCT, device)
    cut = Cut.of(rows, columns, count, blocks, how, wide)
    y = torch.empty(count, columns, device=x.device)
    parts = torch.empty(count * cut.slices(rows) * columns, device=x.device)
    arrived = counters(device, count * columns // SIDE)
    kernel = load_kernel("matvec.cu", "matvec", how.defines(codebook, False, wide), device)
    sizes = map(np.int32, (count, rows, columns))
    kernel(blocks, 32 * how.warps, how.shared_bytes(), table.data_ptr(), which.data_ptr(), *sizes,
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
    device, (tokens, outer), each = table.device.index, x.shape, chosen.shape[1]
    how, blocks = on_device(how or PRODUCT, device)
    pairs = tokens * each
    there = Cut.of(outer, inner, 2 * pairs, blocks, how, wide)
    back = Cut.of(inner, outer, pairs, blocks, how, wide)
    out = torch.empty_like(x)
    parts = torch.empty(pairs * (2 * there.slices(outer) * inner + back.slices(inner) * outer), device=x.device)
    zeros = counters(device, 1 + pairs + tokens * outer // SIDE)
    kernel = load_kernel("matvec.cu", "experts", how.defines(codebook, True, wide), device)
    numbers = map(np.int32, (pairs, each, outer, inner))
    kernel(blocks, 32 * how.warps, how.shared_bytes(),
           table.data_ptr(), chosen.data_ptr(), weights.data_ptr(), *numbers, x.data_ptr(), out.data_ptr(),
           parts.data_ptr(), zeros.data_ptr(), *there.arguments(), *back.arguments(), cooperative=True)  # fmt: skip
    return out
