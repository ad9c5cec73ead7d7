"""What encoded experts cost: their squared error at the layer's output, on rows that nothing was fitted to."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keys35.calibration.statistics import inner
from keys35.exl3.linear import EncodedLinear, decode_weight
from keys35.precision import short_products
from keys35.stages.expert_encoding import LayerRows, Weights, expert_names

Lossy = Callable[[int, float], Weights]
"""An expert's weights as they are at a width."""


@dataclass(frozen=True)
class Judged:
    """One expert's selection rows and what it costs, means over all of a domain's tokens (zero where it is not chosen).

    error and error_se (widths, domains): g^2 |f(x) - f_K(x)|^2 and its standard error over rows; error_by_half
    (2, widths, domains) over half of the windows each. energy (domains,), energy_by_half (2, domains): g^2 |f(x)|^2.
    """

    rows: int
    error: list[list[float]]
    error_se: list[list[float]]
    error_by_half: list[list[list[float]]]
    energy: list[float]
    energy_by_half: list[list[float]]


def decoded(layer: int, encoded: Mapping[tuple[str, float], EncodedLinear]) -> Lossy:
    """Encodings, by module and width, decoded when they are asked for."""

    def lossy(expert: int, width: float) -> Weights:
        parts = [encoded[name, width] for name in expert_names(layer, expert)]
        gate, up, down = (decode_weight(p.trellis, p.suh, p.svh) for p in parts)
        return gate, up, down

    return lossy


def judge(
    weights: Mapping[int, Weights], lossy: Lossy, widths: Sequence[float], rows: LayerRows
) -> dict[int, Judged]:
    """What each expert costs at each width. All are asked of the device before any answer is waited for."""
    routed = {expert: rows.selection.of(expert) for expert in weights}
    counts = [len(index) for index, _ in routed.values()]
    squares = [_squares(parts, (lossy(e, width) for width in widths), rows, *routed[e]) for e, parts in weights.items()]
    groups = 2 * rows.domains  # the domains in one half of the windows, then in the other
    group = rows.domain.cpu() + rows.domains * rows.half.cpu()
    tokens = torch.bincount(group, minlength=groups).double().view(2, rows.domains)
    places = group[torch.cat([index for index, _ in routed.values()]).cpu()]
    places += groups * torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))

    def sums(per_row: Tensor) -> Tensor:  # on the host: a GPU's weighted bincount adds in any order
        return torch.bincount(places, per_row, groups * len(counts)).view(len(counts), 2, rows.domains)

    power, *lost = torch.cat(squares, 1).cpu()
    of_experts = (torch.stack([sums(row) for row in lost], 1), torch.stack([sums(row.square()) for row in lost], 1))
    found = zip(weights, counts, *of_experts, sums(power), strict=True)
    return {expert: _judged(count, tokens, *figures) for expert, count, *figures in found}


def _squares(exact: Weights, lossy: Iterable[Weights], rows: LayerRows, index: Tensor, router: Tensor) -> Tensor:
    """Of each of an expert's rows the energy, then the error at each width, float64 (1 + widths, n)."""
    x = rows.selection.x[index].to(exact[0].device).float()
    counts, wanted = router.to(x.device).double().square(), apply_expert(x, exact)
    deltas = itertools.chain([wanted], (apply_expert(x, parts) - wanted for parts in lossy))
    return torch.stack([counts * delta.double().square().sum(dim=1) for delta in deltas])


def _judged(rows: int, tokens: Tensor, lost: Tensor, spreads: Tensor, power: Tensor) -> Judged:
    """tokens (2, domains): of each half and domain. Of an expert's rows among them: sums of errors and of their squares
    (widths, 2, domains), and of energies (2, domains)."""
    some = tokens.clamp(min=1)
    return Judged(
        rows,
        (lost.sum(1) / tokens.sum(0)).tolist(),
        (spreads.sum(1).sqrt() / tokens.sum(0)).tolist(),
        (lost / some).transpose(0, 1).tolist(),
        (power.sum(0) / tokens.sum(0)).tolist(),
        (power / some).tolist(),
    )


def apply_expert(x: Tensor, weights: Weights) -> Tensor:
    """down(silu(gate x) * up x) with weights (in, out).

    Short products round inputs by some 3e-4, which an encoding's error exceeds a hundredfold at 4 bits: a test holds
    errors at 2 and 4 bits to 5e-3 of float64's on a GPU.
    """
    gate, up, down = weights
    with short_products(x.device):
        return inner(x, gate, up) @ down
