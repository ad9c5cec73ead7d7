"""Refit row and column scales to a finished trellis (format notes 2.10), judged by what fp16 will store."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision import cholesky


@dataclass(frozen=True)
class Target:
    """What an encoding is measured against, made once per weight and shared by its widths.

    weight: float32 (k, n), divided by 2^exponent; hessian: float32 (k, k), undamped; damping: the share of
    its mean diagonal that steadies the fit; damped_product: damped hessian @ weight; energy: tr(W^T H W).
    """

    weight: Tensor
    exponent: Tensor
    hessian: Tensor
    damping: float
    damped_product: Tensor
    energy: Tensor

    @classmethod
    def of(cls, weight: Tensor, exponent: Tensor, hessian: Tensor, damping: float) -> "Target":
        weight = torch.ldexp(weight, -exponent)
        product = hessian @ weight
        energy = (weight * product).sum(-1).sum()
        ridge = damping * hessian.diagonal().mean()
        return cls(weight, exponent, hessian, damping, product + ridge * weight, energy)

    def damped(self, matrix: Tensor) -> Tensor:
        """(H + damping) @ matrix."""
        return self.hessian @ matrix + self.damping * self.hessian.diagonal().mean() * matrix

    def proxy_error(self, weight: Tensor) -> Tensor:
        """tr(E^T H E) / tr(W^T H W) for E = W - weight; 0 when both vanish, 1 when only W's energy does."""
        error = self.weight - weight
        wrong = (error * (self.hessian @ error)).sum(-1).sum().clamp(min=0)
        return torch.where(self.energy > 0, wrong / self.energy, (wrong > 0).float())


def refit(
    target: Target, base: Tensor, su: Tensor, sv: Tensor, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Improve the scales of diag(su) base diag(sv).

    Shapes: base float32 (k, n), the decoded trellis in the weight's own basis; su fp16 (k,), sv fp16 (n,).
    Returns suh, svh and the proxy error of the best round; the given scales are a candidate too, so it never rises.
    """
    def weight(su: Tensor, sv: Tensor) -> Tensor:
        return torch.ldexp(su.float()[:, None] * base * sv.float(), -target.exponent)

    best = (su, sv, target.proxy_error(weight(su, sv)))
    for _ in range(rounds):
        sv = _fit_columns(target, weight(su, sv), sv)
        su = _fit_rows(target, weight(su, sv), su)
        error = target.proxy_error(weight(su, sv))
        better = error < best[2]
        best = tuple(torch.where(better, new, old) for new, old in zip((su, sv, error), best, strict=True))
    return best


def _apply(scale: Tensor, factor: Tensor) -> Tensor:
    """Multiply an fp16 scale, but only where that keeps it finite, signed as it was, and not zero."""
    changed = (scale.float() * factor).half()
    fine = torch.isfinite(changed) & (factor > 0) & (changed != 0)
    return torch.where(fine, changed, scale)


def _fit_columns(target: Target, quantised: Tensor, sv: Tensor) -> Tensor:
    """Each column's best factor on its own: a quotient of quadratic forms."""
    match = (quantised * target.damped_product).sum(0)
    power = (quantised * target.damped(quantised)).sum(0)
    return _apply(sv, torch.where(power > 0, match / power, torch.ones_like(match)))


def _fit_rows(target: Target, quantised: Tensor, su: Tensor) -> Tensor:
    """All rows' best factors at once: least squares in the metric of the Hessian."""
    gram = quantised @ quantised.T
    system = gram * target.hessian
    ridge = target.damping * target.hessian.diagonal().mean()
    system.diagonal().add_(ridge * gram.diagonal())
    system.diagonal().add_(1e-6 * system.diagonal().mean())
    wanted = (quantised * target.damped_product).sum(1)
    lower, failed = cholesky(system)
    factor = torch.cholesky_solve(wanted[:, None], lower)[:, 0]
    return _apply(su, torch.where(failed == 0, factor, torch.ones_like(factor)))
