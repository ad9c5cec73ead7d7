"""Allocate: one width per routed expert under the exact budget, with the baselines beside it."""

from pathlib import Path

import numpy as np

from keys35.allocation import (
    bit_counts,
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
from keys35.stages.choice import Choice, choose, reason, without_mix
from keys35.stages.costs import Measured, prediction_check, read_measured
from keys35.stages.job import Job

ALLOCATION = "allocation.json"
UNIT = "allocate"


def allocate(job: Job) -> dict[str, object]:
    """Choose widths and baselines; writes allocation.json and returns it. Raises BudgetError, ResumeError."""
    measured = read_measured(job)
    experts = job.recipe.experts
    choice = choose(job, measured)
    sets, chosen = width_sets(job, measured, choice), choice.widths
    result = {
        "layers": list(measured.layers),
        "candidate_widths": list(experts.widths),
        "scope": experts.scope,
        "budget": str(experts.budget),
        "choice": choice.facts(),
        "predicted": prediction_check(job),
        "warning": reason(choice.facts()) or without_mix(job.recipe),
        "sets": {name: _describe(widths, measured) for name, widths in sets.items()},
    }
    path = job.work.path(ALLOCATION)
    write_json(path, result)
    job.work.commit(UNIT, [path], {"mean": str(mean_width(chosen)), "counts": bit_counts(chosen)})
    job.work.log("allocated", counts=bit_counts(chosen), basis=choice.basis, correlation=choice.correlation)
    return result


def width_sets(job: Job, measured: Measured, choice: Choice) -> dict[str, list[np.ndarray]]:
    """The allocation with its baselines, widths per layer."""
    return {"allocation": choice.widths} | _baselines(job, measured)


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


def _describe(chosen: list[np.ndarray], measured: Measured) -> dict[str, object]:
    return {
        "mean": str(mean_width(chosen)),
        "counts": bit_counts(chosen),
        "predicted_kl": measured.predicted_kl(chosen),
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
