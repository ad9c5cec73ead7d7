"""What a down projection should be once gate and up are quantized: it takes back what it can of their errors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from keys35.calibration.solve import can_be_fitted, probes, ridge_fit, ridged, solve
from keys35.calibration.statistics import MoeRows, inner, row_weights
from keys35.precision import short_products, vector_sum, whole_products
from keys35.recipe import Calibration

ROWS_PER_FEATURE = 32  # rows of an expert that are enough for its fit: 8 leave 3 % more error on rows held out
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
    total = vector_sum(weight)
    if not can_be_fitted(down, len(index)) or not total > 0:
        return dict.fromkeys(lossy, down)
    x = rows.x[index].to(down.device).float()
    root = (weight / total).sqrt()[:, None]
    with short_products(x.device):
        wanted = inner(x, gate, up) * root
        return {width: _corrected(inner(x, *parts) * root, wanted, down) for width, parts in lossy.items()}


def _corrected(found: Tensor, wanted: Tensor, down: Tensor) -> Tensor:
    """One width at a time: what it gets does not depend on which others are asked for, to the last bit.

    Nor on streams of their own, which would be faster: library factorisations of one handle, side by side, did not
    repeat their bits on an H200.
    """
    grams, matches = _sums_by_half(found, wanted)
    ridge, gain = max(zip(RIDGES, _gains(grams, matches, down).tolist(), strict=True), key=lambda pair: pair[1])
    if not gain > 0:
        return down
    return torch.addmm(down, ridge_fit(grams.sum(0), matches.sum(0), ridge), down)


def _sums_by_half(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """q^T q and q^T (h - q) over each half of the rows, (2, f, f) both."""
    block = max(1, min(BLOCK, len(found) // 8))
    first = (torch.arange(len(found), device=found.device) // block) % 2 == 0
    halves = [(found[half], (wanted - found)[half]) for half in (first, ~first)]
    return torch.stack([q.T @ q for q, _ in halves]), torch.stack([q.T @ missing for q, missing in halves])


def _gains(grams: Tensor, matches: Tensor, down: Tensor) -> Tensor:
    """How much good each ridge's fit to one half of the (2, f, f) sums does on the other, both ways, float64 (ridges,).

    Some of the outputs stand for all.
    """
    right = matches @ probes(down)
    with whole_products():
        fits = solve(torch.stack([ridged(grams, ridge) for ridge in RIDGES]), right.expand(len(RIDGES), *right.shape))
    gains = (fits * (2 * right.flip(0) - grams.flip(0) @ fits)).sum((1, 2, 3), dtype=torch.float64)
    return gains.nan_to_num(nan=-torch.inf)
