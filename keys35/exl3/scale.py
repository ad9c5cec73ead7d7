"""Scales: of the output columns, of the input rows, and of the tiles (format notes 2.3 to 2.5)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision import vector_sum
from .hadamard import BLOCK, rotate_in, rotate_out

_TILE_SCALE = {
    **{1.0: 1.12, 1.5: 1.03, 2.0: 1.00, 2.5: 0.96, 3.0: 0.93, 3.5: 0.93},
    **{4.0: 0.92, 5.0: 0.88, 6.0: 0.84, 7.0: 0.82, 8.0: 0.80},
}

_ROUNDING_ERROR = {
    **{1.0: 0.27296, 1.5: 0.13700, 2.0: 0.06844, 2.5: 0.03456, 3.0: 0.01744, 3.5: 0.00882},
    **{4.0: 0.004456, 5.0: 0.001142, 6.0: 0.0002965, 7.0: 7.88e-5, 8.0: 2.05e-5},
}

_MARGIN = 0.98  # tiles of a matrix are not all alike, and a scale too large costs more than one too small
_SMALLEST = 2.0**-24  # the least positive fp16


def best_scale(bits: float) -> float:
    """The standard deviation at which Gaussian tiles meet the mul1 codebook best."""
    return _TILE_SCALE[float(bits)]


def rounding_error(bits: float) -> float:
    """The mean square error that the search leaves of Gaussian tiles of variance 1 at their best scale."""
    return _ROUNDING_ERROR[float(bits)]


def tile_scale(span: Tensor, feedback: Tensor | None, bits: float) -> Tensor:
    """The factor that brings float32 rows (r, n) to the scale that codes best; 1 for rows of zeros.

    feedback: (r, r), what the errors of these rows will still add to one another, or None.
    """
    power = tile_power(span, feedback, bits)
    return torch.where(power > 0, _MARGIN * best_scale(bits) * power.rsqrt(), torch.ones_like(power))


def tile_power(span: Tensor, feedback: Tensor | None, bits: float) -> Tensor:
    """The mean square of what will be rounded for float32 rows (..., r, n): they and the errors handed on to them."""
    power = span.square().mean(-1).mean(-1)
    if feedback is not None:
        power = power * (1 + 1.1 * 4.0**-bits * feedback.square().sum(-1).sum(-1) / feedback.shape[-1])
    return power


@dataclass(frozen=True)
class Regularised:
    """A weight written as 2^exponent diag(su) Hk rotated Hn diag(sv).

    rotated: float32 (k, n); su: (k,), 0 for zero rows; sv: (n,), 0 for zero columns; exponent: int32 ().
    """

    rotated: Tensor
    su: Tensor
    sv: Tensor
    exponent: Tensor


def _rms(x: Tensor, dim: int) -> Tensor:
    """Root mean square that neither overflows nor underflows."""
    peak = x.abs().amax(dim, keepdim=True)
    safe = torch.where(peak > 0, peak, torch.ones_like(peak))
    return ((x / safe).square().mean(dim, keepdim=True).sqrt() * peak).squeeze(dim)


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0."""
    return torch.where(x != 0, 1 / x, torch.zeros_like(x))


def _unit_mean(x: Tensor) -> Tensor:
    """Divide by the mean of the entries that are not zero."""
    return x / (x.sum() / (x > 0).sum().clamp(min=1)).clamp(min=1e-30)


@dataclass(frozen=True)
class ScalePowers:
    """How far columns and rows are evened out before the rotation.

    columns: a column is divided by its RMS to this power. At 1 every column would be coded with the same relative
    error, at 0 with the same absolute error; at 1/2 the sum of squared errors is least.
    rows: likewise for rows, where feedback moves the optimum towards 1.
    inputs: a row is also multiplied by its input's mean square to this power, so that inputs that are large get
    smaller errors than feedback alone would give them.
    """

    columns: float = 0.5
    rows: float = 0.75
    inputs: float = 0.12


FULL_POWERS = ScalePowers(columns=1.0, rows=1.0, inputs=0.0)
"""Every column and row brought to one size, as the reference quantizer does."""


def regularise(
    weight: Tensor, signs_in: Tensor, signs_out: Tensor, input_power: Tensor | None, powers: ScalePowers
) -> Regularised:
    """Even out columns and rows, then rotate, so that tiles look like Gaussian noise.

    Shapes: weight float32 (k, n), finite; signs (k,) and (n,); input_power (k,), the Hessian's diagonal, or None.
    """
    exponent = torch.frexp(weight.abs().max()).exponent
    weight = torch.ldexp(weight, -exponent)
    columns = _rms(weight, 0)
    sv = torch.where(columns > 0, signs_out * _unit_mean(columns.pow(powers.columns)), torch.zeros_like(columns))
    weight = rotate_out(weight * _inverse(sv))
    rows = _rms(weight, 1)
    su = torch.where(rows > 0, signs_in * rows.pow(powers.rows), torch.zeros_like(rows))
    if input_power is not None:
        su = su * input_power.clamp(min=1e-3 * input_power.mean()).pow(-powers.inputs)
    weight = weight * _inverse(su)[:, None]
    # a factor common to a block of columns costs nothing, and lets one scale fit all its tiles
    blocks = _block_power(weight).sqrt().repeat_interleave(BLOCK)
    return Regularised(rotate_in(weight * _inverse(blocks)), su, sv * blocks, exponent)


def _block_power(weight: Tensor) -> Tensor:
    """The mean square (n/128,) of each 128 columns of (k, n), the same bits for any count of threads."""
    if weight.shape[1] == BLOCK:  # the only sum of its kind: torch shares it out
        return vector_sum(weight.square().flatten())[None] / weight.numel()
    return weight.view(len(weight), -1, BLOCK).square().mean((0, 2))


def to_half(su: Tensor, sv: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Round 2^exponent su sv to fp16, moving a power of two from one to the other so that both stay normal.

    Entries that were not zero stay so in sv: a reader takes svh = 0 for a column that does not exist.
    """
    size_u = torch.frexp(_rms(su, 0)).exponent
    size_v = torch.frexp(_rms(sv, 0)).exponent
    total = size_u + size_v + exponent
    # su where activations like it, unless sv would then leave the range of fp16
    target = torch.clamp(total - size_v, -8, 2)
    target = torch.maximum(torch.minimum(target, total + 12), total - 12)
    target = torch.where(total < -20, torch.div(total, 2, rounding_mode="floor"), target)
    suh = torch.ldexp(su, target - size_u).half()
    svh = torch.ldexp(sv, total - target - size_v)
    tiny = (svh != 0) & (svh.abs() < _SMALLEST)
    return suh, torch.where(tiny, torch.copysign(torch.full_like(svh, _SMALLEST), svh), svh).half()
