"""Which widths, and on what ground: experts' own costs, or a random mix where held-out text does not bear them out.

Costs measured on one half of the selection windows choose widths that the other half prices. Where that loses to a
random mix in any domain, each is promised more of the gain; where that does not help, or the set was read without some
of its domains or with too little held-out text of one, experts' own costs are not followed: of many random mixes the
safest is taken, not the first drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import chain

import numpy as np

from keys35.allocation import (
    fair_allocation,
    neighbours,
    one_width_per_layer,
    per_layer,
    price,
    random_layers,
    random_mix,
    rank_correlation,
    whole_model,
)
from keys35.calibration.text import TextSet, load_text_set
from keys35.calibration.windows import shares
from keys35.recipe import Calibration, Recipe
from keys35.stages.costs import Measured, read_measured
from keys35.stages.job import Job

EXPERTS, RANDOM = "experts", "random"
FAIRER = (0.75, 1.0)  # what every domain is given of the mean gain where less leaves one worse off on held-out text
DRAWS = 512
LEAST_TOKENS = 8192  # held out, of a domain: at 2,048 halves agreed and the panel did not (reports/ablations)


@dataclass(frozen=True)
class Choice:
    """The widths per layer, and how they came about.

    basis: "experts" (each one's own costs) or "random". fairness: the share of the mean gain that every domain was to
    get: the recipe's, or more where that lost in one. gains: by domain, what costs of one half of the text gain over
    a random mix on the other half, both ways averaged; empty where no mix can be named. one_way: domains of which one
    half has no text, so that the gain is of one way alone. correlation: Spearman's, of the experts' costs from the two
    halves. missing: domains of the set that were not read; scant: those with less than `LEAST_TOKENS` of held-out text,
    or none that could judge. weights: the domains' in it.
    """

    widths: list[np.ndarray]
    basis: str
    fairness: float
    gains: dict[str, float]
    one_way: tuple[str, ...]
    correlation: float
    missing: tuple[str, ...]
    scant: tuple[str, ...]
    weights: np.ndarray

    def facts(self) -> dict[str, object]:
        """All but the widths, for allocation.json."""
        found = {key: value for key, value in asdict(self).items() if key not in ("widths", "weights")}
        named = {key: list(found[key]) for key in ("one_way", "missing", "scant")}
        return found | named | {"domain_weights": self.weights.tolist()}


def choose(job: Job, measured: Measured) -> Choice:
    """The allocation under the job's recipe, on the surest ground that its experts' costs allow."""
    halves = [read_measured(job, half) for half in (0, 1)]
    missing = _missing(load_text_set(job.recipe.calibration.set, job.folder), job.text)
    correlation = rank_correlation(*(np.concatenate([c[:, 0] for c in half.costs()]) for half in halves))
    fairness, gains, one_way = _fair_enough(job, halves)
    scant = _scant(job.text, job.recipe.calibration, gains)
    loses = bool(gains) and (bool(missing) or bool(scant) or min(gains.values()) < 0)
    basis = RANDOM if loses and job.recipe.experts.fallback else EXPERTS
    widths, weights = widths_on(job, measured, basis, fairness)
    return Choice(widths, basis, fairness, gains, one_way, correlation, missing, scant, weights)


def _fair_enough(job: Job, halves: Sequence[Measured]) -> tuple[float, dict[str, float], tuple[str, ...]]:
    """The least fairness from the recipe's on at which no domain loses, with its gains; the recipe's if none does."""
    experts = job.recipe.experts
    asked = experts.fairness, *_held_out_gain(job, halves, experts.fairness)
    if experts.fallback and experts.fairness:
        more = (level for level in FAIRER if level > experts.fairness)
        tries = chain([asked], ((level, *_held_out_gain(job, halves, level)) for level in more))
        return next((found for found in tries if min(found[1].values(), default=0) >= 0), asked)
    return asked


def without_mix(recipe: Recipe) -> str | None:
    """That a recipe's widths make no random mix to fall back on, though it asks for that; None if they do."""
    experts, pair = recipe.experts, neighbours(recipe.experts.budget)
    lacking = [str(width) for width in dict.fromkeys(pair) if width not in experts.widths]
    if not (experts.fallback and lacking):
        return None
    return (f"experts.widths lack {' and '.join(lacking)}: there is no random mix of {float(experts.budget):.6g} bits "
            "to compare experts' costs with or to fall back on, and they are followed whatever held-out text says of "
            "them; add the width, or set experts.fallback = false to have it so")


def foregone(recipe: Recipe) -> str | None:
    """What the recipe and its text alone say of the widths' ground: that it is a random mix whatever is measured, or
    that there is no such mix; None where it is to be seen.

    Raises RecipeError for a missing set or domain.
    """
    if none := without_mix(recipe):
        return none
    whole = load_text_set(recipe.calibration.set)
    text = whole.only(recipe.calibration.domains)
    missing, scant = _missing(whole, text), _scant(text, recipe.calibration, {})
    if not (missing or scant) or not recipe.experts.fallback:
        return None
    return reason({"gains": {}, "missing": missing, "scant": scant, "basis": RANDOM})


def _missing(whole: TextSet, read: TextSet) -> tuple[str, ...]:
    named = {domain.name for domain in read.domains}
    return tuple(domain.name for domain in whole.domains if domain.name not in named)


def _scant(text: TextSet, calibration: Calibration, gains: Mapping[str, float]) -> tuple[str, ...]:
    windows = zip(text.domains, shares(text, calibration.selection_windows), strict=True)
    return tuple(domain.name for domain, count in windows
                 if count * calibration.window < LEAST_TOKENS or (gains and domain.name not in gains))


def widths_on(
    job: Job, measured: Measured, basis: str, fairness: float | None = None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Widths by experts' costs or at random, and the domains' weights in that; fairness: None for the recipe's."""
    if basis == RANDOM:
        return _at_random(job, measured), np.ones(len(measured.share))
    return _cheapest(job, measured, job.recipe.experts.fairness if fairness is None else fairness)


def _at_random(job: Job, measured: Measured) -> list[np.ndarray]:
    """A random mix that keeps what the recipe asks for: of whole layers, or the safest of DRAWS mixes of experts.

    The safest costs least, against an average mix, where it costs most: in each domain that was read, in text that uses
    experts as all of it does, and in text that uses them the other way round. The cheapest in what was read would be
    dear in other text (reports/ablations).
    """
    recipe, sizes = job.recipe, [len(layer) for layer in measured.error]
    widths, budget, seed = recipe.experts.widths, recipe.experts.budget, recipe.seed
    if recipe.output.profile == "uniform-layer":
        return random_layers(sizes, budget, seed)

    def draw(number: int) -> list[np.ndarray]:
        if recipe.experts.scope == "model":
            return random_mix(sizes, budget, number)
        return [random_mix([size], budget, number + place)[0] for place, size in enumerate(sizes)]

    costs = [np.concatenate(parts, axis=2)
             for parts in zip(measured.costs_by_domain(), measured.costs_by_use(), strict=True)]
    average = np.maximum(typical(costs, widths, budget), np.finfo(float).tiny)
    numbers = np.random.default_rng(seed).integers(1 << 62, size=DRAWS).tolist()
    return min(map(draw, numbers), key=lambda mix: (_paid(costs, mix, widths) / average).max())


def _paid(costs: list[np.ndarray], mix: list[np.ndarray], widths: Sequence[float]) -> np.ndarray:
    return sum(price(layer, picked, widths) for layer, picked in zip(costs, mix, strict=True))


def _held_out_gain(
    job: Job, halves: Sequence[Measured], fairness: float
) -> tuple[dict[str, float], tuple[str, ...]]:
    """By domain, what one half's widths save of a random mix's cost on the other half; empty where there is no mix.

    Also the domains that one half alone could judge: a half without text of a domain finds that all widths cost it
    nothing, which is no gain. One that neither half can judge has none.
    """
    experts, found = job.recipe.experts, {domain.name: [] for domain in job.text.domains}
    for chooser, judge in (halves, halves[::-1]):
        costs = judge.costs_by_domain()
        random = typical(costs, experts.widths, experts.budget)
        if random is None:
            return {}, ()
        widths, _ = widths_on(job, chooser, EXPERTS, fairness)
        paid = _paid(costs, widths, experts.widths)
        for gains, ours, average in zip(found.values(), paid.tolist(), random.tolist(), strict=True):
            gains += [1 - ours / average] if average else []
    means = {name: float(np.mean(gains)) for name, gains in found.items() if gains}
    return means, tuple(name for name, gains in found.items() if len(gains) == 1)


def reason(choice: dict[str, object]) -> str | None:
    """What speaks against experts' own costs, and what to do; None where nothing does."""
    lost = [f"{name} ({gain:+.1%})" for name, gain in choice["gains"].items() if gain < 0]
    why = [f"the calibration text lacks its set's domains {', '.join(choice['missing'])}"] if choice["missing"] else []
    why += [f"there are fewer than {LEAST_TOKENS:,} tokens of held-out text (calibration.selection_windows) in "
            f"{', '.join(choice['scant'])}"] if choice["scant"] else []
    why += [f"costs from half of the held-out text do not beat a random mix on the other half in {', '.join(lost)}"
            ] if lost else []
    if not why and len(choice["gains"]) == 1:
        [only] = choice["gains"]
        return (f"the calibration text has one domain, '{only}': nothing tells what the widths do to others; add text "
                "of each kind that the model is used for")
    if not why:
        return None
    kept = "experts.fallback" if choice["gains"] else "experts.widths lack those of a random mix"
    how = "are a random mix" if choice["basis"] == RANDOM else f"follow it all the same ({kept})"
    return f"{' and '.join(why)}: widths {how}; add such text or more of it (calibration.*) and measure again"


def _cheapest(job: Job, measured: Measured, fairness: float) -> tuple[list[np.ndarray], np.ndarray]:
    """The allocation, and the weight that every domain had in it (1 each, unless fairness asked for more)."""
    experts, costs = job.recipe.experts, measured.costs_by_domain()
    solver = _solver(job)

    def solve(layers: list[np.ndarray]) -> list[np.ndarray]:
        return solver(layers, experts.widths, experts.budget)

    random = typical(costs, experts.widths, experts.budget)
    if random is None or not fairness:
        return solve(measured.costs()), np.ones(len(measured.share))
    return fair_allocation(solve, costs, experts.widths, random, fairness)


def typical(costs: list[np.ndarray], widths: Sequence[float], budget: Fraction) -> np.ndarray | None:
    """What a random mix of the neighbouring whole widths costs each domain on average; None if one is no candidate."""
    low, high = neighbours(budget)
    if not {low, high} <= set(widths):
        return None
    share = float(budget - low)
    return sum((1 - share) * layer[:, widths.index(low)].sum(0) + share * layer[:, widths.index(high)].sum(0)
               for layer in costs)


def _solver(job: Job) -> Callable[[list[np.ndarray], Sequence[int], Fraction], list[np.ndarray]]:
    if job.recipe.output.profile == "uniform-layer":
        return one_width_per_layer
    return whole_model if job.recipe.experts.scope == "model" else per_layer
