"""What the allocation is worth: every set of widths on the same panel, from the encodings in the work directory."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from keys35.progress import Progress
from keys35.runtime.panel import Panel
from keys35.runtime.ranks import Ranks
from keys35.runtime.reference import Reference
from keys35.runtime.score import score_panel
from keys35.stages.allocate import ALLOCATION, allocation_sets
from keys35.stages.candidates import MixStore, are_held
from keys35.stages.job import Job
from keys35.stages.validate import held_out_panel


def compare_baselines(job: Job, progress: Progress) -> dict[str, dict[str, Any]]:
    """Score the sets in allocation.json on the held-out panel, one process, one unit of work per set.

    Sets whose encodings were not kept are left out. Needs the reference that `validate` keeps under the work directory.
    """
    panel = held_out_panel(job.source.root, job.config, job.recipe)
    reference = Reference.open(job.work.path("validate", "reference"), panel)
    sets = allocation_sets(job.work.path(ALLOCATION))
    held = {name: widths for name, widths in sets.items() if are_held(job, widths)}
    return score_sets(job, "baselines", held, panel, reference, progress)


def score_sets(
    job: Job,
    folder: str,
    sets: Mapping[str, Mapping[int, list[float]]],
    panel: Panel,
    reference: Reference,
    progress: Progress,
    final: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of each named set of widths (layer -> width per expert), one receipt per set under `folder`.

    Experts are as they were measured; those of the set `final` as the checkpoint gets them, if that is otherwise.
    """
    results = {}
    for step in progress.walk("baselines", sets.items(), lambda item: item[0]):
        name, widths = step.unit
        unit = f"{folder}/{name}"
        identity = {"widths": {str(layer): row for layer, row in widths.items()}, "panel": panel.fingerprint}
        receipt = job.work.receipt(unit)
        step.kept = receipt is not None and receipt["data"]["identity"] == identity
        if not step.kept:
            metrics = score_panel(MixStore(job, widths, final=name == final), Ranks(), panel, reference)
            job.work.commit(unit, [], {"identity": identity, "metrics": metrics})
        results[name] = job.work.receipt(unit)["data"]["metrics"]
    return results


def gate(baselines: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A warning where the allocation is not better than the random mixes on held-out text, None if it is everywhere.

    On the whole panel it must beat their mean; in a domain it may not lose to it by more than their standard error.
    Where a mean leaves no choice, as that of the least width does, all are one checkpoint and nothing is to be said.
    """
    random = [metrics for name, metrics in baselines.items() if name.startswith("random-")]
    if all(metrics["kl"] == baselines["allocation"]["kl"] for metrics in random):
        return None
    mean, _ = _mean_and_error([metrics["kl"] for metrics in random])
    lost = []
    if baselines["allocation"]["kl"] >= mean:
        lost.append(f"the allocation's KL {baselines['allocation']['kl']:.4f} is no better than the random mixes' "
                    f"mean {mean:.4f} on held-out text")
    for domain, scored in baselines["allocation"]["domains"].items():
        mean, error = _mean_and_error([metrics["domains"][domain]["kl"] for metrics in random])
        if scored["kl"] > mean + error:
            lost.append(f"in domain '{domain}' its KL {scored['kl']:.4f} is worse than theirs, {mean:.4f} +- "
                        f"{error:.4f}")
    if not lost:
        return None
    return "; ".join(lost) + ": broaden the calibration text before you trust it"


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error (0 for a single value)."""
    spread = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return fmean(values), spread
