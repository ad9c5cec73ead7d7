"""Launches gpu/reconstruct.cu and gpu/matvec.cu: work on many encoded matrices in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..codebook import CODEBOOKS
from .launch import Limits, load_kernel

SIDE, THREADS = 128, 256
LARGEST_SLICE = 1024  # inputs a block of matvec.cu can hold
_LIMB_BYTES = LARGEST_SLICE // 16 * 2 * 4 * 16 + 16 + 64


@dataclass(frozen=True)
class Reconstruction:
    """Settings of reconstruct.cu: `exact` keeps 22 bits between rotations, `packed` adds up in halves, `narrow` has one
    path for all widths up to 4; blocks a multiprocessor."""

    exact: bool = False
    packed: bool = False
    narrow: bool = True
    blocks: int = 2

    def defines(self, codebook: str, brain: bool) -> tuple[tuple[str, int], ...]:
        return (("CODEBOOK", CODEBOOKS.index(codebook)), ("BRAIN", int(brain)), ("EXACT", int(self.exact)),
                ("PACKED", int(self.packed)), ("NARROW", int(self.narrow)), ("BLOCKS", self.blocks))  # fmt: skip

    def shared_bytes(self) -> int:
        return SIDE * (76 if self.packed else 136) * 4 + SIDE * 4


@dataclass(frozen=True)
class Product:
    """Settings of matvec.cu: tiles side by side and below each other, blocks a multiprocessor, bytes of packed words a
    warp holds, whether shifts are shared out between units, inputs a slice."""

    columns: int = 4
    unroll: int = 4
    blocks: int = 3
    ring: int = 4096
    mixed: bool = True
    slice_in: int = 1024
    slice_out: int = 512

    def defines(self, codebook: str) -> tuple[tuple[str, int], ...]:
        return (("CODEBOOK", CODEBOOKS.index(codebook)), ("COLUMNS", self.columns), ("UNROLL", self.unroll),
                ("BLOCKS", self.blocks), ("RING", self.ring), ("MIXED", int(self.mixed)))  # fmt: skip

    def shared_bytes(self) -> int:
        return THREADS // 32 * self.ring + _LIMB_BYTES


BFLOAT16, HALF, PRODUCT = Reconstruction(packed=True, blocks=3), Reconstruction(), Product()
"""The fastest on an H200; to half, whose rounding is finer, sums stay float32."""


def describe(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The table that kernels read, int64 (count, 6), of matrices given as (trellis, suh, svh) on one GPU."""
    rows = [
        [t.data_ptr(), suh.data_ptr(), svh.data_ptr(), t.shape[0] * 16, t.shape[1] * 16, t.shape[2] // 16]
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
    kernel(
        (blocks, len(outs), 1), 2 * THREADS, how.shared_bytes(), table.data_ptr(), chosen.data_ptr(), places.data_ptr()
    )


class Barrier:
    """Where the blocks of a grid meet, one for each device: two counters that are zero between launches' rounds."""

    @staticmethod
    @lru_cache
    def of(device: int) -> Tensor:
        return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")


def _launch(symbol: str, codebook: str, how: Product, device: int, *arguments: object) -> None:
    kernel = load_kernel("matvec.cu", symbol, how.defines(codebook), device)
    limits = Limits.of(device)
    blocks = max(
        1, min(how.blocks, limits.shared_total // (how.shared_bytes() + 1024))
    )  # 1 KiB a block is the driver's
    kernel(blocks * limits.multiprocessors, THREADS, how.shared_bytes(), *arguments, cooperative=True)


def _spread(how: Product, rows: int, outputs: int, device: int) -> Product:
    """Slices so short that a few matrices still keep every block busy."""
    ranges = max(1, outputs // (THREADS // 32 * how.columns * 16))
    slices = max(1, how.blocks * Limits.of(device).multiprocessors // ranges)
    return replace(how, slice_in=min(how.slice_in, max(SIDE, rows // slices // SIDE * SIDE)))


def matvec(table: Tensor, which: Tensor, x: Tensor, columns: int, codebook: str, how: Product | None = None) -> Tensor:
    """x[i] W[which[i]] in float32 (count, columns); int32 (count,), float32 (count, k); all of one shape."""
    device, (count, rows) = table.device.index, x.shape
    how = how or _spread(PRODUCT, rows, count * columns, device)
    slices = -(-rows // how.slice_in)
    y = torch.empty(count, columns, device=x.device)
    parts = torch.empty(count * slices * columns, device=x.device)
    _launch("matvec", codebook, how, device, table.data_ptr(), which.data_ptr(), np.int32(count), x.data_ptr(),
            y.data_ptr(), parts.data_ptr(), Barrier.of(device).data_ptr(), np.int32(how.slice_in))  # fmt: skip
    return y


def experts(
    table: Tensor, chosen: Tensor, weights: Tensor, x: Tensor, inner: int, codebook: str, how: Product | None = None
) -> Tensor:
    """Sum over each token's experts of weight * down(silu(gate x) * up x), float32 (T, d), in one launch.

    table: gate, up and down of expert 0, then 1, ..; chosen int32 (T, k); weights float32 (T, k); x float32 (T, d).
    """
    device, (tokens, outer), each = table.device.index, x.shape, chosen.shape[1]
    how, pairs = how or PRODUCT, tokens * each
    slices_in, slices_out = -(-outer // how.slice_in), -(-inner // how.slice_out)
    out = torch.empty_like(x)
    parts = torch.empty(pairs * max(2 * slices_in * inner, slices_out * outer), device=x.device)
    hidden = torch.empty(pairs, inner, device=x.device)
    _launch("experts", codebook, how, device, table.data_ptr(), chosen.data_ptr(), weights.data_ptr(), np.int32(pairs),
            np.int32(each), x.data_ptr(), out.data_ptr(), parts.data_ptr(), hidden.data_ptr(),
            Barrier.of(device).data_ptr(), np.int32(how.slice_in), np.int32(how.slice_out))  # fmt: skip
    return out
