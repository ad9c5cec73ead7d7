"""What a down projection should be once gate and up are quantized: it takes back what it can of their errors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from keys35.calibration.statistics import MoeRows, inner, row_weights
from keys35.recipe import Calibration

ROWS_PER_FEATURE = 8  # rows of an expert that are enough for its fit
LEAST_ROWS = 0.25  # per feature: with fewer there is nothing to fit
RIDGES = (0.1, 0.3, 1.0, 3.0)  # shares of the mean diagonal that hold a fit near the source's weights
BLOCK = 64  # neighbouring rows are of one text: halves are made of blocks


def corrected_downs(
    rows: MoeRows, expert: int, exact: tuple[Tensor, Tensor, Tensor], lossy: Mapping[float, tuple[Tensor, Tensor]],
    choice: Calibration,
) -> dict[float, Tensor]:
    """The down projection (f, d) to encode at each width, given gate and up (d, f) as they were encoded at it.

    With h the inner activations and q those of the encoded gate and up, it is down + (q^T q + ridge)^-1 q^T (h - q)
    down over the expert's own rows (weighted as its Hessian is): the least squares fit of q W to h down. The ridge is
    the one whose fit to half of the rows does best on the other half; down stays as it is where none does good, and
    for an expert with hardly any rows.
    """
    gate, up, down = exact
    index, router = rows.of(expert)
    step = max(1, len(index) // (ROWS_PER_FEATURE * len(down)))
    index, router = index[::step], router[::step].to(down.device)
    weight = row_weights(router, choice)
    if len(index) < max(2, LEAST_ROWS * len(down)) or not weight.sum() > 0:
        return dict.fromkeys(lossy, down)
    x = rows.x[index].to(down.device).float()
    root = (weight / weight.sum()).sqrt()[:, None]
    wanted = inner(x, gate, up) * root
    return {width: _corrected(inner(x, *parts) * root, wanted, down) for width, parts in lossy.items()}


@dataclass(frozen=True)
class _Sums:
    """q^T q (f, f) and q^T (h - q) down (f, d) over some rows."""

    gram: Tensor
    match: Tensor

    @classmethod
    def of(cls, found: Tensor, wanted: Tensor, down: Tensor) -> "_Sums":
        return cls(found.T @ found, found.T @ (wanted - found) @ down)

    def fit(self, ridge: float) -> Tensor:
        """(q^T q + ridge)^-1 q^T (h - q) down; zeros where that has no finite solution."""
        steady = self.gram + ridge * self.gram.diagonal().mean() * torch.eye(len(self.gram), device=self.gram.device)
        lower, failed = torch.linalg.cholesky_ex(steady)
        fit = torch.cholesky_solve(self.match, lower)
        return torch.where((failed == 0) & torch.isfinite(fit).all(), fit, torch.zeros_like(fit))

    def gain(self, fit: Tensor) -> Tensor:
        """By how much a fit lowers the squared error on these rows, float64 ()."""
        return (fit * (2 * self.match - self.gram @ fit)).sum(dtype=torch.float64)


def _corrected(found: Tensor, wanted: Tensor, down: Tensor) -> Tensor:
    block = max(1, min(BLOCK, len(found) // 8))
    first = (torch.arange(len(found), device=found.device) // block) % 2 == 0
    a, b = (_Sums.of(found[half], wanted[half], down) for half in (first, ~first))
    gains = torch.stack([b.gain(a.fit(ridge)) + a.gain(b.fit(ridge)) for ridge in RIDGES])
    best = int(gains.argmax())
    if not float(gains[best]) > 0:
        return down
    return down + _Sums(a.gram + b.gram, a.match + b.match).fit(RIDGES[best])
