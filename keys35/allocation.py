"""Widths for whole experts under an exact bit budget, and the baselines to beat. Pure functions of numbers."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from keys35.errors import BudgetError


def exact_allocation(costs: np.ndarray, widths: Sequence[int], mean_bits: Fraction) -> np.ndarray:
    """The cheapest width per expert whose mean is exactly `mean_bits`: a dynamic programme over whole bits.

    costs: (N, len(widths)) float64, any non-negative unit. Returns (N,) int64 widths. O(N * budget) time;
    19,200 experts at 2.75 from {2, 3, 4} take seconds. Ties go to the narrower width. Raises BudgetError.
    """
    count, extras, spare = _budget(costs, widths, mean_bits)
    best = np.full(spare + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((count, spare + 1), dtype=np.int8)
    for row in range(count):
        options = np.full((len(widths), spare + 1), np.inf)
        for index, extra in enumerate(extras):
            if extra <= spare:
                options[index, extra:] = best[: spare + 1 - extra] + costs[row, index]
        choice[row] = options.argmin(axis=0)
        best = options.min(axis=0)
    if not np.isfinite(best[spare]):
        raise BudgetError(f"no mix of the widths {list(widths)} over {count} experts has a mean of {mean_bits} bits")
    picked = np.empty(count, dtype=np.int64)
    for row in range(count - 1, -1, -1):
        picked[row] = choice[row, spare]
        spare -= extras[picked[row]]
    return np.asarray(widths)[picked]


def _budget(costs: np.ndarray, widths: Sequence[int], mean_bits: Fraction) -> tuple[int, list[int], int]:
    count = costs.shape[0]
    if not np.isfinite(costs).all() or (costs < 0).any():
        rows = np.flatnonzero(~np.isfinite(costs).all(axis=1) | (costs < 0).any(axis=1))
        raise BudgetError(f"costs of experts {rows[:8].tolist()} are negative or not finite: measure again")
    require_exact(mean_bits, count)
    spare = int(mean_bits * count) - widths[0] * count
    if not 0 <= spare <= (widths[-1] - widths[0]) * count:
        raise BudgetError(f"a mean of {mean_bits} bits lies outside the widths {list(widths)}")
    return count, [width - widths[0] for width in widths], spare


def require_exact(mean_bits: Fraction, count: int, what: str = "experts") -> None:
    """Refuse (BudgetError) a mean that `count` whole widths cannot have, and name the nearest ones they can."""
    total = mean_bits * count
    if total.denominator != 1:
        below, above = int(total), int(total) + 1
        raise BudgetError(
            f"{count} {what} cannot have a mean of exactly {mean_bits} bits: {mean_bits} x {count} is no whole number. "
            f'The nearest means they can have are "{below}/{count}" ({below / count:.5g}) and "{above}/{count}" '
            f"({above / count:.5g})"
        )


def one_width_per_layer(costs: Sequence[np.ndarray], widths: Sequence[int], mean_bits: Fraction) -> list[np.ndarray]:
    """The exact allocation with one width in every layer: the mean over the layers is exact (they have one size)."""
    require_exact(mean_bits, len(costs), "layers of one width")
    picked = exact_allocation(np.stack([layer.sum(axis=0) for layer in costs]), widths, mean_bits)
    return [np.full(len(layer), width, dtype=np.int64) for layer, width in zip(costs, picked, strict=True)]


def per_layer(costs: Sequence[np.ndarray], widths: Sequence[int], mean_bits: Fraction) -> list[np.ndarray]:
    """The exact allocation with the same mean in every layer; costs[l] is (experts, widths)."""
    return [exact_allocation(layer, widths, mean_bits) for layer in costs]


def whole_model(costs: Sequence[np.ndarray], widths: Sequence[int], mean_bits: Fraction) -> list[np.ndarray]:
    """The exact allocation over all layers at once; layers may get different means."""
    picked = exact_allocation(np.concatenate(costs), widths, mean_bits)
    return np.split(picked, np.cumsum([len(layer) for layer in costs])[:-1])


def neighbours(mean_bits: Fraction) -> tuple[int, int]:
    """The two whole widths around a mean: 2 and 3 for 2.75 (and 3 alone, twice, for 3)."""
    low = int(mean_bits)
    return low, low + (mean_bits.denominator != 1)


def random_mix(sizes: Sequence[int], mean_bits: Fraction, seed: int) -> list[np.ndarray]:
    """The two neighbouring widths shuffled over all experts of the model, mean exact."""
    low, high = neighbours(mean_bits)
    count = sum(sizes)
    raised = (mean_bits - low) * count
    if raised.denominator != 1:
        raise BudgetError(f"{count} experts cannot mix {low} and {high} bits to a mean of exactly {mean_bits}")
    widths = np.full(count, low, dtype=np.int64)
    widths[np.random.default_rng(seed).permutation(count)[: int(raised)]] = high
    return np.split(widths, np.cumsum(sizes)[:-1])


def random_layers(sizes: Sequence[int], mean_bits: Fraction, seed: int) -> list[np.ndarray]:
    """The two neighbouring widths shuffled over whole layers of one size, mean exact."""
    picked = random_mix([1] * len(sizes), mean_bits, seed)
    return [np.full(size, width[0], dtype=np.int64) for size, width in zip(sizes, picked, strict=True)]


def bit_counts(widths: Sequence[np.ndarray]) -> dict[int, int]:
    """Experts per width, narrowest first."""
    values, counts = np.unique(np.concatenate(widths), return_counts=True)
    return {int(v): int(c) for v, c in zip(values, counts, strict=True)}


def mean_width(widths: Sequence[np.ndarray]) -> Fraction:
    """The exact mean bits per weight (experts of a model have one size)."""
    flat = np.concatenate(widths)
    return Fraction(int(flat.sum()), len(flat))
