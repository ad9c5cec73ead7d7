"""What a down projection should be once gate and up are quantized: it takes back what it can of their errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from keys35.calibration.solve import solve
from keys35.calibration.statistics import MoeRows, inner, row_weights
from keys35.recipe import Calibration

ROWS_PER_FEATURE = 8  # rows of an expert that are enough for its fit
LEAST_ROWS = 0.25  # per feature: with fewer there is nothing to fit
RIDGES = (0.1, 0.3, 1.0, 3.0)  # shares of the mean diagonal that hold a fit near the source's weights
BLOCK = 64  # neighbouring rows are of one text: halves are made of blocks
PROBES = 256  # outputs that are enough to tell which ridge is best


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
    with _short_products(x.device):
        wanted = inner(x, gate, up) * root
        sums = [_sums_by_half(inner(x, *parts) * root, wanted) for parts in lossy.values()]
    grams, matches = (torch.stack(part) for part in zip(*sums, strict=True))
    chosen = _best_ridges(grams, matches, down)
    ridges = torch.tensor([ridge or max(RIDGES) for ridge in chosen], device=x.device)
    changes = solve(_ridged(grams.sum(1), ridges[:, None])[:, 0], matches.sum(1))
    usable = torch.isfinite(changes).all(-1).all(-1).tolist()
    with _short_products(x.device):
        return {
            width: torch.addmm(down, change, down) if ridge and fine else down
            for width, change, ridge, fine in zip(lossy, changes, chosen, usable, strict=True)
        }


@contextmanager
def _short_products(device: torch.device) -> Iterator[None]:
    """Matrix products of a GPU at ten bits of mantissa: the errors that are fitted here are larger by far."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _sums_by_half(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """q^T q and q^T (h - q) over each half of the rows, (2, f, f) both."""
    block = max(1, min(BLOCK, len(found) // 8))
    first = (torch.arange(len(found), device=found.device) // block) % 2 == 0
    halves = [(found[half], (wanted - found)[half]) for half in (first, ~first)]
    return torch.stack([q.T @ q for q, _ in halves]), torch.stack([q.T @ missing for q, missing in halves])


def _best_ridges(grams: Tensor, matches: Tensor, down: Tensor) -> list[float | None]:
    """Of each width's (widths, 2, f, f) sums the ridge whose fit to one half does most good on the other, both ways.

    None where none does any. Some of the outputs stand for all.
    """
    right = matches @ down[:, :: max(1, down.shape[1] // PROBES)]
    ridged = _ridged(grams, torch.tensor(RIDGES, device=down.device))
    fits = solve(ridged, right[:, :, None].expand(*ridged.shape[:3], *right.shape[2:]))
    other, wanted = grams.flip(1)[:, :, None], right.flip(1)[:, :, None]
    gains = (fits * (2 * wanted - other @ fits)).sum((-1, -2), dtype=torch.float64).sum(1)
    gains, best = gains.nan_to_num(nan=-torch.inf).max(1)
    return [RIDGES[i] if gain > 0 else None for gain, i in zip(gains.tolist(), best.tolist(), strict=True)]


def _ridged(grams: Tensor, ridges: Tensor) -> Tensor:
    """Each (.., f, f) with each of (.., ridges) shares of its mean diagonal on the diagonal, (.., ridges, f, f)."""
    added = ridges * grams.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    eye = torch.eye(grams.shape[-1], device=grams.device)
    return torch.addcmul(grams[..., None, :, :], added[..., None, None], eye)
