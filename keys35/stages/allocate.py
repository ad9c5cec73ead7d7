"""Allocate: one width per routed expert under the exact budget, with the baselines beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from keys35.allocation import (
    bit_counts,
    fair_allocation,
    mean_width,
    neighbours,
    one_width_per_layer,
    per_layer,
    plain_width,
    random_layers,
    random_mix,
    whole_model,
)
from keys35.errors import ResumeError
from keys35.files.atomic import read_json, write_json
from keys35.stages.job import Job
from keys35.stages.units import SENSITIVITY, expert_units

ALLOCATION = "allocation.json"
UNIT = "allocate"


@dataclass(frozen=True)
class Measured:
    """Measured errors per MoE layer. error[l]: (experts, widths, domains), g^2 |f - f_K|^2 per selection token.

    energy[l]: (experts, domains), the same of g^2 |f|^2.
    alpha[l]: (domains,), nats of final KL per unit of the layer's summed error. share: (domains,), sums to 1.
    """

    layers: tuple[int, ...]
    widths: tuple[int, ...]
    error: tuple[np.ndarray, ...]
    energy: tuple[np.ndarray, ...]
    alpha: tuple[np.ndarray, ...]
    share: np.ndarray

    def costs_by_domain(self) -> list[np.ndarray]:
        """(experts, widths, domains) per layer: predicted nats of final KL, each domain's part of the mean."""
        return [e * (self.share * a) for e, a in zip(self.error, self.alpha, strict=True)]

    def costs(self) -> list[np.ndarray]:
        """(experts, widths) per layer: predicted nats of final KL."""
        return [layer.sum(axis=2) for layer in self.costs_by_domain()]

    def predicted_costs(self, sample: int = 1) -> list[np.ndarray]:
        """Costs as `costs` has them, but from the output's energy and what `sample` encoded experts a layer lost."""
        costs = []
        for error, energy, alpha in zip(self.error, self.energy, self.alpha, strict=True):
            lost = error[:sample].sum(axis=(0, 2)) / energy[:sample].sum()
            costs.append((energy * (self.share * alpha)).sum(axis=1)[:, None] * lost)
        return costs

    def plain_errors(self) -> list[np.ndarray]:
        """(experts, widths) per layer without layer weights: errors only, as if layers were comparable."""
        return [(e * self.share).sum(axis=2) for e in self.error]


def read_measured(job: Job) -> Measured:
    """Collect the receipts of `measure`; raises ResumeError naming the first unit that is missing."""
    layers = tuple(job.config.moe_layers)
    errors, energies = [], []
    for layer in layers:
        parts, powers = [], []
        for unit in expert_units(job, layer):
            receipt = job.work.receipt(unit.name)
            if receipt is None:
                raise _unmeasured(job, unit.name)
            parts.append(np.asarray(receipt["data"]["error"], dtype=np.float64))
            powers.append(np.asarray(receipt["data"]["energy"], dtype=np.float64))
        errors.append(np.concatenate(parts))
        energies.append(np.concatenate(powers))
    receipt = job.work.receipt(SENSITIVITY)
    if receipt is None:
        raise _unmeasured(job, SENSITIVITY)
    alpha = tuple(np.asarray(receipt["data"]["alpha"][str(layer)], dtype=np.float64) for layer in layers)
    share = np.array([domain.share for domain in job.text.domains])
    return Measured(layers, job.recipe.experts.widths, tuple(errors), tuple(energies), alpha, share / share.sum())


def _unmeasured(job: Job, unit: str) -> ResumeError:
    return ResumeError(f"{job.work.root}: '{unit}' is not measured yet: run `keys35 measure` on this directory first")


def allocate(job: Job) -> dict[str, object]:
    """Choose widths and baselines; writes allocation.json and returns it. Raises BudgetError, ResumeError."""
    measured = read_measured(job)
    experts = job.recipe.experts
    costs = measured.costs()
    sets, weights = width_sets(job, measured)
    chosen = sets["allocation"]
    result = {
        "layers": list(measured.layers),
        "candidate_widths": list(experts.widths),
        "scope": experts.scope,
        "budget": str(experts.budget),
        "domain_weights": weights.tolist(),
        "sets": {name: _describe(widths, costs, experts.widths) for name, widths in sets.items()},
    }
    path = job.work.path(ALLOCATION)
    write_json(path, result)
    job.work.commit(UNIT, [path], {"mean": str(mean_width(chosen)), "counts": bit_counts(chosen)})
    job.work.log("allocated", counts=bit_counts(chosen))
    return result


def width_sets(job: Job, measured: Measured) -> tuple[dict[str, list[np.ndarray]], np.ndarray]:
    """The allocation under the job's recipe with its baselines, widths per layer; and the domains' weights in it."""
    chosen, weights = _choose(job, measured)
    return {"allocation": chosen} | _baselines(job, measured), weights


def _choose(job: Job, measured: Measured) -> tuple[list[np.ndarray], np.ndarray]:
    """The allocation, and the weight that every domain had in it (1 each, unless fairness asked for more)."""
    experts, costs = job.recipe.experts, measured.costs_by_domain()
    solver = _solver(job)

    def solve(layers: list[np.ndarray]) -> list[np.ndarray]:
        return solver(layers, experts.widths, experts.budget)

    typical = _typical(costs, experts.widths, experts.budget)
    if typical is None or not experts.fairness:
        return solve(measured.costs()), np.ones(len(measured.share))
    return fair_allocation(solve, costs, experts.widths, typical, experts.fairness)


def _typical(costs: list[np.ndarray], widths: Sequence[float], budget: Fraction) -> np.ndarray | None:
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


def _baselines(job: Job, measured: Measured) -> dict[str, list[np.ndarray]]:
    """Random mixes, the same count in every layer, errors without layer weights: same bytes; and uniform widths.

    Where every layer has one width, mixes shuffle whole layers, and `per-expert` shows what that limit costs.
    """
    budget, widths = job.recipe.experts.budget, measured.widths
    sizes = [len(layer) for layer in measured.error]
    low, high = neighbours(budget)
    uniform = job.recipe.output.profile == "uniform-layer"
    sets: dict[str, list[np.ndarray]] = {}
    if {low, high} <= set(widths):
        for seed in range(job.recipe.panel.random_mixes):
            sets[f"random-{seed}"] = random_layers(sizes, budget, seed) if uniform else random_mix(sizes, budget, seed)
        if not uniform and (budget * sizes[0]).denominator == 1:
            columns = [widths.index(low), widths.index(high)]
            errors = [layer[:, columns] for layer in measured.plain_errors()]
            sets["equal-per-layer"] = per_layer(errors, (low, high), budget)
    if uniform:
        sets["per-expert"] = whole_model(measured.costs(), widths, budget)
    sets["error-only"] = (one_width_per_layer if uniform else whole_model)(measured.plain_errors(), widths, budget)
    for width in widths:
        if width in (low, high):
            sets[f"uniform-{width}"] = [np.full(size, width, dtype=np.int64) for size in sizes]
    return sets


def _describe(chosen: list[np.ndarray], costs: list[np.ndarray], widths: tuple[int, ...]) -> dict[str, object]:
    index = {width: column for column, width in enumerate(widths)}
    predicted = sum(
        layer[np.arange(len(layer)), [index[w] for w in picked]].sum()
        for layer, picked in zip(costs, chosen, strict=True)
    )
    return {
        "mean": str(mean_width(chosen)),
        "counts": bit_counts(chosen),
        "predicted_kl": float(predicted),
        "widths": [[plain_width(width) for width in layer] for layer in chosen],
    }


def load_allocation(job: Job, name: str = "allocation") -> dict[int, list[float]]:
    """Layer -> width per expert of a set in allocation.json; raises ResumeError if allocate has not run."""
    if job.work.receipt(UNIT) is None:
        raise ResumeError(f"{job.work.root}: nothing is allocated yet: run `keys35 allocate --work {job.work.root}`")
    return allocation_sets(job.work.path(ALLOCATION))[name]


def allocation_sets(path: Path) -> dict[str, dict[int, list[int]]]:
    """Every set of an allocation.json: name -> layer -> width per expert."""
    stored = read_json(path)
    return {
        name: dict(zip(stored["layers"], entry["widths"], strict=True)) for name, entry in stored["sets"].items()
    }
