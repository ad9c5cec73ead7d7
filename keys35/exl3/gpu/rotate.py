"""Launches gpu/rotate.cu: Hadamard rotations and the decoding of trellises at the speed of memory."""

import numpy as np
import torch
from torch import Tensor

from ...errors import EncodeError
from .launch import load_kernel

SIDE = 128
_BLOCK_BYTES = SIDE * (SIDE + 1) * 4
_KERNELS = {
    torch.float32: "reconstruct_float32",
    torch.float16: "reconstruct_float16",
    torch.bfloat16: "reconstruct_bfloat16",
}


def rotate_blocks(matrices: Tensor, inputs: bool, outputs: bool) -> Tensor:
    """Hk W, W Hn or Hk W Hn of float32 (..., k, n) on a GPU; k and n are multiples of 128 where they are rotated.

    The same bits as `hadamard.rotate_out(hadamard.rotate_in(W))` on the CPU.
    """
    *batch, k, n = matrices.shape
    matrices = matrices.contiguous()
    out = torch.empty_like(matrices)
    kernel = load_kernel("rotate.cu", "rotate", (), matrices.device.index)
    grid = (n // SIDE, k // SIDE, int(np.prod(batch, dtype=np.int64)))
    if 0 not in grid:
        kernel(
            grid,
            SIDE,
            _BLOCK_BYTES,
            matrices.data_ptr(),
            out.data_ptr(),
            np.int64(k),
            np.int64(n),
            np.int32(inputs),
            np.int32(outputs),
        )
    return out


def reconstruct(trellis: Tensor, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a mul1 trellis on a GPU: int16 (k/16, n/16, 16 * bits) to (k, n) of a dtype.

    scales: suh (k,) and svh (n,), fp16, for the weight in its own basis; None for the codebook values, unrotated.
    Raises EncodeError for a dtype without a kernel.
    """
    if dtype not in _KERNELS:
        raise EncodeError(f"a trellis decodes to {', '.join(str(d) for d in _KERNELS)}, not {dtype}")
    rows, columns, words = trellis.shape
    trellis = trellis.contiguous()
    out = torch.empty(rows * 16, columns * 16, dtype=dtype, device=trellis.device)
    suh, svh = (scale.contiguous() for scale in scales) if scales else (None, None)
    kernel = load_kernel("rotate.cu", _KERNELS[dtype], (), trellis.device.index)
    grid = (columns * 16 // SIDE, rows * 16 // SIDE, 1)
    if 0 not in grid:
        kernel(
            grid,
            SIDE,
            _BLOCK_BYTES + (SIDE // 16) ** 2 * words * 2,
            trellis.data_ptr(),
            suh.data_ptr() if scales else 0,
            svh.data_ptr() if scales else 0,
            out.data_ptr(),
            np.int32(columns * 16),
            np.int32(words // 16),
            np.int32(words // 8 % 2),
        )
    return out
