"""Widths for whole experts under an exact bit budget, and the baselines to beat. Pure functions of numbers."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from keys35.errors import BudgetError

ROUNDS, RISE = 100, 1.05


def exact_allocation(costs: np.ndarray, widths: Sequence[float], mean_bits: Fraction) -> np.ndarray:
    """The cheapest width per expert whose mean is exactly `mean_bits`.

    costs: (N, len(widths)) float64, any non-negative unit. Returns (N,) widths, int64, or float64 where half rates
    are among them. 19,200 experts take milliseconds where each next step up saves an expert less than the last, as
    errors do, but for a few, and seconds where that does not hold for most, or widths are not a step apart. Of equals
    the first experts get the bits, those first of whom that holds. Raises BudgetError.
    """
    count, extras, spare = _budget(costs, widths, mean_bits)
    picked = _step_by_step(costs, extras, spare)
    if picked is None:
        picked = _programme(costs, extras, spare)
    if picked is None:
        raise BudgetError(f"no mix of the widths {list(widths)} over {count} experts has a mean of {mean_bits} bits")
    return np.asarray(widths)[picked]


def _step_by_step(costs: np.ndarray, extras: Sequence[int], spare: int) -> np.ndarray | None:
    """Columns (N,) that cost least, by taking the steps up that save most; None where widths are not a step apart.

    Where no step saves an expert more than the one before it, the steps taken are the best there are, and an expert's
    are its first. The others are a programme of their own, which says what they cost with any part of the budget.
    """
    step = extras[1] - extras[0] if len(extras) > 1 else 1
    if spare % step or set(np.diff(extras)) - {step}:
        return None
    steps, saved = spare // step, costs[:, :-1] - costs[:, 1:]
    odd = (saved[:, 1:] > saved[:, :-1]).any(axis=1)
    falling, rest = np.flatnonzero(~odd), np.flatnonzero(odd)
    offered = saved[falling].T.ravel()  # columns first: (step, expert)
    order = np.lexsort((np.tile(np.arange(len(falling)), saved.shape[1]), -offered))
    gained = np.concatenate([[0.0], np.cumsum(offered[order])])
    most = min(steps, len(rest) * saved.shape[1])
    paid, choice = _table(costs[rest], range(len(extras)), most) if len(rest) else (np.zeros(1), None)
    least = max(0, steps - len(offered))  # what the others must take
    given = least + int((paid[least:] - gained[steps - np.arange(least, most + 1)]).argmin())
    picked = np.empty(len(costs), dtype=np.int64)
    picked[falling] = np.bincount(order[: steps - given] % max(1, len(falling)), minlength=len(falling))
    if choice is not None:
        picked[rest] = _path(choice, range(len(extras)), given)
    return picked


def _programme(costs: np.ndarray, extras: Sequence[int], spare: int) -> np.ndarray | None:
    """Columns (N,) that cost least, whatever the costs: a dynamic programme over the budget; None if there are none."""
    best, choice = _table(costs, extras, spare)
    return _path(choice, extras, spare) if np.isfinite(best[spare]) else None


def _table(costs: np.ndarray, extras: Sequence[int], spare: int) -> tuple[np.ndarray, np.ndarray]:
    """The least cost with each part of a budget (spare + 1,), and each expert's column in it (N, spare + 1).

    O(N * budget) time, and a byte for each.
    """
    best = np.full(spare + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((len(costs), spare + 1), dtype=np.int8)
    for row in range(len(costs)):
        options = np.full((len(extras), spare + 1), np.inf)
        for index, extra in enumerate(extras):
            if extra <= spare:
                options[index, extra:] = best[: spare + 1 - extra] + costs[row, index]
        choice[row] = options.argmin(axis=0)
        best = options.min(axis=0)
    return best, choice


def _path(choice: np.ndarray, extras: Sequence[int], spare: int) -> np.ndarray:
    """The columns (N,) by which a table comes to a part of the budget."""
    picked = np.empty(len(choice), dtype=np.int64)
    for row in range(len(choice) - 1, -1, -1):
        picked[row] = choice[row, spare]
        spare -= extras[picked[row]]
    return picked


def _budget(costs: np.ndarray, widths: Sequence[float], mean_bits: Fraction) -> tuple[int, list[int], int]:
    """Number of experts, and in steps (bits, or half bits) each width's excess over the narrowest and their sum."""
    count = costs.shape[0]
    if not np.isfinite(costs).all() or (costs < 0).any():
        rows = np.flatnonzero(~np.isfinite(costs).all(axis=1) | (costs < 0).any(axis=1))
        raise BudgetError(f"costs of experts {rows[:8].tolist()} are negative or not finite: measure again")
    steps = 1 if all(width == int(width) for width in widths) else 2  # a bit in steps
    require_exact(mean_bits, count, steps=steps)
    extras = [int((width - widths[0]) * steps) for width in widths]
    spare = int((mean_bits - Fraction(widths[0])) * count * steps)
    if not 0 <= spare <= extras[-1] * count:
        raise BudgetError(f"a mean of {mean_bits} bits lies outside the widths {list(widths)}")
    return count, extras, spare


def require_exact(mean_bits: Fraction, count: int, what: str = "experts", steps: int = 1) -> None:
    """Refuse (BudgetError) a mean that `count` widths cannot have, and name the nearest whole ones they can."""
    total = mean_bits * count
    if (total * steps).denominator != 1:
        below, above = int(total), int(total) + 1
        raise BudgetError(
            f"{count} {what} cannot have a mean of exactly {mean_bits} bits: {mean_bits} x {count} is no whole number. "
            f'The nearest means they can have are "{below}/{count}" ({below / count:.5g}) and "{above}/{count}" '
            f"({above / count:.5g})"
        )


def one_width_per_layer(costs: Sequence[np.ndarray], widths: Sequence[float], mean_bits: Fraction) -> list[np.ndarray]:
    """The exact allocation with one width in every layer: the mean over the layers is exact (they have one size)."""
    require_exact(mean_bits, len(costs), "layers of one width")
    picked = exact_allocation(np.stack([layer.sum(axis=0) for layer in costs]), widths, mean_bits)
    return [np.full(len(layer), width) for layer, width in zip(costs, picked, strict=True)]


def per_layer(costs: Sequence[np.ndarray], widths: Sequence[float], mean_bits: Fraction) -> list[np.ndarray]:
    """The exact allocation with the same mean in every layer; costs[l] is (experts, widths)."""
    return [exact_allocation(layer, widths, mean_bits) for layer in costs]


def whole_model(costs: Sequence[np.ndarray], widths: Sequence[float], mean_bits: Fraction) -> list[np.ndarray]:
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


def plain_width(width: float) -> int | float:
    """A width as files and JSON name it: 3, not 3.0; 2.5."""
    return int(width) if width == int(width) else float(width)


def fair_allocation(
    solve: Callable[[list[np.ndarray]], list[np.ndarray]],
    costs: Sequence[np.ndarray],
    widths: Sequence[float],
    typical: np.ndarray,
    fairness: float,
) -> tuple[list[np.ndarray], np.ndarray]:
    """The cheapest widths at which every domain gains at least `fairness` of the mean gain over a random mix.

    costs[l]: (experts, widths, domains), predicted nats of each domain, already times its share. typical: (domains,),
    a random mix's cost; a domain that costs nothing, as one without text does, asks for nothing. `solve` takes
    (experts, widths) costs. While a domain gains too little, its weight rises by a twentieth; after ROUNDS of that the
    fairest found is taken. Returns the widths and the domains' weights.
    """
    weights, best, total = np.ones(len(typical)), None, typical.sum()
    for _ in range(ROUNDS):
        chosen = solve([layer @ weights for layer in costs])
        paid = sum(price(layer, picked, widths) for layer, picked in zip(costs, chosen, strict=True))
        gain = 1 - np.divide(paid, typical, out=np.full_like(paid, -np.inf), where=typical > 0)
        missing = fairness * (1 - paid.sum() / total if total else 0.0) - gain.min()
        if best is None or missing < best[0]:
            best = (missing, chosen, weights)
        if missing <= 0:
            break
        weights = weights * np.where(np.arange(len(gain)) == gain.argmin(), RISE, 1.0)
        weights = weights / weights.mean()
    return best[1], best[2]


def price(costs: np.ndarray, picked: np.ndarray, widths: Sequence[float]) -> np.ndarray:
    """What the picked widths cost in each domain: costs (experts, widths, domains), picked (experts,) of `widths`."""
    return costs[np.arange(len(picked)), np.searchsorted(widths, picked)].sum(axis=0)


def bit_counts(widths: Sequence[np.ndarray]) -> dict[int | float, int]:
    """Experts per width, narrowest first."""
    values, counts = np.unique(np.concatenate(widths), return_counts=True)
    return {plain_width(v): int(c) for v, c in zip(values, counts, strict=True)}


def mean_width(widths: Sequence[np.ndarray]) -> Fraction:
    """The exact mean bits per weight (experts of a model have one size)."""
    flat = np.concatenate(widths)
    return Fraction(float(flat.sum())) / len(flat)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation of two sequences of numbers (ties share their mean rank).

    1 for fewer than two, and 0 where all of one are alike: that says nothing of an order.
    """
    if len(a) < 2:
        return 1.0
    ranks = [_mean_ranks(values) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(rank) for rank in ranks) else 0.0


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
