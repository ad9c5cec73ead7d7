"""Orthonormal Hadamard rotations in blocks of 128 (format notes 1.8).

Butterflies, not matrix products: each result is the same chain of additions whatever the shape, the batch or
the device.
"""

import math

import torch
from torch import Tensor

from .gpu import usable
from .gpu.rotate import rotate_blocks

BLOCK = 128


def _rotate(x: Tensor, dim: int) -> Tensor:
    shape = x.shape
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    for log_half in range(7):
        half = 1 << log_half
        x = x.reshape(outer, -1, 2, half * inner)
        low, high = x[:, :, 0], x[:, :, 1]
        x = torch.stack((low + high, low - high), dim=2)
    return (x * BLOCK**-0.5).reshape(shape)


def _on_gpu(weight: Tensor) -> bool:
    """Whether the kernel, which makes the same bits in one pass, can have this one."""
    whole = weight.ndim >= 2 and not (weight.shape[-1] % BLOCK or weight.shape[-2] % BLOCK)
    return weight.is_cuda and weight.dtype == torch.float32 and whole and usable(weight.device.index)


def rotate_in(weight: Tensor) -> Tensor:
    """Hk W: rotate the inputs (dimension -2, a multiple of 128) of float32 (..., k, n). Its own inverse."""
    if _on_gpu(weight):
        return rotate_blocks(weight, inputs=True, outputs=False)
    return _rotate(weight, weight.ndim - 2)


def rotate_out(weight: Tensor) -> Tensor:
    """W Hn: rotate the outputs (dimension -1, a multiple of 128) of float32 (..., k, n). Its own inverse."""
    if _on_gpu(weight):
        return rotate_blocks(weight, inputs=False, outputs=True)
    return _rotate(weight, weight.ndim - 1)


def rotate_both(weight: Tensor) -> Tensor:
    """Hk W Hn, the inputs first, of float32 (..., k, n). Its own inverse, up to rounding."""
    if _on_gpu(weight):
        return rotate_blocks(weight, inputs=True, outputs=True)
    return rotate_out(rotate_in(weight))
