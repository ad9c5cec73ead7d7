"""The metric of the rounding: a damped, rotated Hessian and its block factor (format notes 2.2 and 2.9)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision import cholesky
from .hadamard import rotate_both
from .tiles import TILE

_RETRIES = 10


@dataclass(frozen=True)
class HessianFactor:
    """L of Hr = L D L^T with 16 x 16 blocks, for Hr the rotated and damped Hessian of k inputs.

    feedback: float32 (k, k), strictly block-lower (the unit blocks on the diagonal are left out), or None.
    damping: what was added to the diagonal, as a share of its mean.
    fallback: there was no usable Hessian, and so there is no feedback.
    """

    feedback: Tensor | None
    damping: float
    fallback: bool


def usable_hessian(hessian: Tensor | None) -> Tensor | None:
    """The Hessian scaled to a mean diagonal of 1 and made symmetric, or None when it carries no information.

    Finiteness comes first: a NaN passes every threshold.
    """
    if hessian is None:
        return None
    hessian = hessian.float()
    if not bool(torch.isfinite(hessian).all()):
        return None
    mean = hessian.diagonal().mean()
    if not float(mean) > 1e-20:
        return None
    hessian = hessian / mean
    return (hessian + hessian.T) / 2


def factor_hessian(hessian: Tensor | None, scales: Tensor, sigma_reg: float) -> HessianFactor:
    """Factor Hk diag(scales) H diag(scales) Hk + damping.

    Shapes: hessian (k, k), the mean of x x^T over inputs x, or None; scales (k,), the signs with or without
    the row scales of the weight. A Hessian that is None, zero or not finite gives a fallback, no feedback.
    A factorisation that fails is tried again with twice `sigma_reg` more damping, up to ten times.
    """
    hessian = usable_hessian(hessian)
    if hessian is None:
        return HessianFactor(None, 0.0, True)
    damping = sigma_reg
    for _ in range(_RETRIES + 1):
        lower, failed = cholesky(damped_metric(hessian, scales, damping))
        if not int(failed):
            return HessianFactor(_block_unit(lower), damping, False)
        damping += 2 * sigma_reg
    return HessianFactor(None, damping, True)


def damped_metric(hessian: Tensor, scales: Tensor, damping: float) -> Tensor:
    """Hk diag(scales) hessian diag(scales) Hk with `damping` of its mean diagonal added to the diagonal."""
    rotated = rotate_both(hessian * scales * scales[:, None])
    mean = rotated.diagonal().mean()
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))  # a weight of zeros has scales of zero
    return rotated + damping * mean * torch.eye(len(scales), device=rotated.device)


def _block_unit(lower: Tensor) -> Tensor:
    """Right-multiply every block column of a Cholesky factor by its inverse diagonal block; clear that."""
    k = lower.shape[0]
    columns = lower.view(k, k // TILE, TILE).transpose(0, 1)
    blocks = torch.arange(k // TILE, device=lower.device)
    diagonal = lower.view(k // TILE, TILE, k // TILE, TILE)[blocks, :, blocks]
    unit = torch.linalg.solve_triangular(diagonal, columns, upper=False, left=False)
    unit.view(k // TILE, k // TILE, TILE, TILE)[blocks, blocks] = 0
    return unit.transpose(0, 1).reshape(k, k)
