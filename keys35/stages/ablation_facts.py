"""What an ablation's row says of a variant beside its sets: metrics in short, unseen perturbations, proxy errors."""

from statistics import fmean
from typing import Any

import numpy as np

from keys35.allocation import plain_width, random_mix
from keys35.runtime.panel import Panel
from keys35.runtime.ranks import Ranks
from keys35.runtime.reference import Reference
from keys35.runtime.score import score_panel
from keys35.stages.candidates import MixStore
from keys35.stages.costs import Measured
from keys35.stages.job import Job
from keys35.stages.units import expert_units

AS_MEASURED = "allocation-as-measured"
"""A variant's own widths without its quantized prefix, as its other sets of widths are scored."""


def unseen(job: Job, measured: Measured, judge: tuple[Panel, Reference]) -> dict[str, dict[str, float]]:
    """KL of perturbations that no layer weight was made from, beside what they predict; nothing else is quantized.

    Each layer alone at its narrowest width, a random mix, and every expert at the widest width.
    """
    widths, sizes = measured.widths, [len(layer) for layer in measured.error]
    sets = {f"layer {layer} alone at {widths[0]}": [np.full(size, widths[0] if here == place else 0)
                                                   for here, size in enumerate(sizes)]
            for place, layer in enumerate(measured.layers)}
    mix = random_mix(sizes, job.recipe.experts.budget, job.recipe.seed)
    sets |= {"a random mix": mix} if {int(w) for row in mix for w in row} <= set(widths) else {}
    sets[f"all at {widths[-1]}"] = [np.full(size, widths[-1]) for size in sizes]
    found = {}
    for name, chosen in sets.items():
        layers = [[plain_width(w) or None for w in row] for row in chosen]
        store = MixStore(job, dict(zip(measured.layers, layers, strict=True)), only_experts=True)
        found[name] = {"predicted": measured.predicted_kl(layers), "kl": score_panel(store, Ranks(), *judge)["kl"]}
    return found


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Those of a set's metrics that a row keeps; of domains the KL alone."""
    kept = {key: metrics[key] for key in ("kl", "kl_reverse", "top1", "top2", "ppl", "ppl_reference")}
    kept["domains"] = {name: scored["kl"] for name, scored in metrics["domains"].items()}
    return kept | ({"mtp_acceptance": metrics["mtp"]["acceptance"]} if "mtp" in metrics else {})


def proxy_errors(job: Job) -> dict[str, float]:
    """Mean proxy error of the routed experts at each candidate width."""
    found: dict[str, list[float]] = {}
    for layer in job.config.moe_layers:
        for unit in expert_units(job, layer):
            receipt = job.work.receipt(unit.name)
            for width, experts in receipt["data"]["proxy_error"].items():
                found.setdefault(width, []).extend(error for expert in experts if expert for error in expert)
    return {width: fmean(errors) for width, errors in found.items()}
