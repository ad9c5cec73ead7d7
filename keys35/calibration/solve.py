"""Systems of equations with a ridge: one, or many at once."""

import torch
from torch import Tensor

from keys35.precision import cholesky

BLOCK = 256
PROBES = 256  # outputs that are enough to tell which fit of a linear is best
LEAST_ROWS = 0.25  # per feature: with fewer there is nothing to fit


def can_be_fitted(weight: Tensor, rows: int) -> bool:
    """Whether there are enough rows for a fit of a weight (in, out)."""
    return rows >= max(2, LEAST_ROWS * len(weight))


def probes(weight: Tensor) -> Tensor:
    """Some of the outputs of a weight (in, out), evenly spread, which stand for all of them."""
    return weight[:, :: max(1, weight.shape[1] // PROBES)]


def ridged(grams: Tensor, ridge: float) -> Tensor:
    """(.., n, n) with a share of its mean diagonal added to the diagonal."""
    diagonals = grams.diagonal(dim1=-2, dim2=-1)
    found = grams.clone()
    found.diagonal(dim1=-2, dim2=-1).add_(ridge * diagonals.mean(-1, keepdim=True))
    return found


def ridge_fit(gram: Tensor, match: Tensor, ridge: float) -> Tensor:
    """(gram + ridge)^-1 match, (n, n) and (n, m); zeros where that has no finite solution."""
    lower, failed = cholesky(ridged(gram, ridge))
    fit = torch.cholesky_solve(match, lower)
    return torch.where((failed == 0) & torch.isfinite(fit).all(), fit, torch.zeros_like(fit))


def solve(systems: Tensor, right: Tensor) -> Tensor:
    """x of systems x = right, symmetric positive definite, (.., n, n) and (.., n, m); not finite where one is not.

    A blocked Cholesky factorisation whose larger part is matrix products of all systems together: library routines do
    large ones one after the other.
    """
    shape, n = right.shape, systems.shape[-1]
    left, x = systems.reshape(-1, n, n).clone(), right.reshape(-1, n, right.shape[-1]).clone()
    inverses, parts = [], [slice(at, min(at + BLOCK, n)) for at in range(0, n, BLOCK)]
    for here in parts:
        below, inverse = slice(here.stop, n), _inverse_factor(left[:, here, here])
        inverses.append(inverse)
        x[:, here] = inverse @ x[:, here]
        panel = left[:, below, here] @ inverse.mT
        left[:, below, here] = panel
        left[:, below, below] -= panel @ panel.mT
        x[:, below] -= panel @ x[:, here]
    for here, inverse in zip(reversed(parts), reversed(inverses), strict=True):
        below = slice(here.stop, n)
        x[:, here] = inverse.mT @ (x[:, here] - left[:, below, here].mT @ x[:, below])
    return x.view(shape)


def _inverse_factor(blocks: Tensor) -> Tensor:
    """The inverses of (count, n, n) Cholesky factors; NaN where there is none."""
    lower, failed = cholesky(blocks)
    eye = torch.eye(blocks.shape[-1], device=blocks.device).expand_as(blocks)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
    return torch.where((failed == 0)[:, None, None], inverse, torch.nan)
