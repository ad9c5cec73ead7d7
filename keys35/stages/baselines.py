"""What the allocation is worth: every set of widths on the same panel, from the encodings in the work directory."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from torch import Tensor

from keys35.exl3.linear import decode_weight
from keys35.glm.block import LayerWeights
from keys35.glm.names import Role
from keys35.glm.weights import Keep, Overlay, WeightStore
from keys35.progress import Progress
from keys35.runtime.panel import Panel
from keys35.runtime.ranks import Ranks
from keys35.runtime.reference import Reference
from keys35.runtime.score import score_panel
from keys35.stages.allocate import ALLOCATION, allocation_sets
from keys35.stages.candidates import Candidates, are_held
from keys35.stages.job import Job
from keys35.stages.units import dense_file, dense_unit, load_recorded
from keys35.stages.validate import held_out_panel


class MixStore(WeightStore):
    """The model with dense linears and MTP experts as they end up and routed experts at any given widths.

    only_experts: everything but the given experts as the source has it; a width of None too.
    """

    def __init__(self, job: Job, widths: Mapping[int, list[float | None]], only_experts: bool = False):
        super().__init__(job.source, job.config, device=job.device)
        self._job, self._only_experts = job, only_experts
        mtp = {} if only_experts else {layer: [job.recipe.mtp.bits] * job.experts for layer in job.config.mtp_layers}
        self._widths = {**widths, **mtp}

    def layer(self, layer: int, keep: Keep = Keep.DENSE) -> LayerWeights:
        """One layer over its carried tensors: dense linears decoded now, experts when asked for."""
        dense = super().layer(layer, keep)
        if not self._only_experts:
            dense = Overlay(dense, self._dense(layer))
        if layer not in self._widths:
            return dense
        return Candidates(self._job, layer).overlay(dense, self._widths[layer])

    def _dense(self, layer: int) -> dict[str, Tensor]:
        rules = [rule for rule in self._job.rules.values() if rule.layer == layer and rule.role is Role.DENSE]
        stored = load_recorded(self._job, dense_unit(layer), dense_file(self._job, layer)) if rules else {}
        matrices = {}
        for rule in rules:
            parts = (stored[f"{rule.module}.{part}"].to(self.device) for part in ("trellis", "suh", "svh"))
            matrix = decode_weight(*parts)[: rule.in_features, : rule.out_features]
            matrices[rule.module.split(".", 3)[3]] = matrix
        return matrices


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
) -> dict[str, dict[str, Any]]:
    """Metrics of each named set of widths (layer -> width per expert), one receipt per set under `folder`."""
    results = {}
    for step in progress.walk("baselines", sets.items(), lambda item: item[0]):
        name, widths = step.unit
        unit = f"{folder}/{name}"
        identity = {"widths": {str(layer): row for layer, row in widths.items()}, "panel": panel.fingerprint}
        receipt = job.work.receipt(unit)
        step.kept = receipt is not None and receipt["data"]["identity"] == identity
        if not step.kept:
            metrics = score_panel(MixStore(job, widths), Ranks(), panel, reference)
            job.work.commit(unit, [], {"identity": identity, "metrics": metrics})
        results[name] = job.work.receipt(unit)["data"]["metrics"]
    return results


def gate(baselines: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A warning where the allocation is not better than the random mixes on held-out text, None if it is everywhere.

    On the whole panel it must beat their mean; in a domain it may not lose to it by more than their standard error.
    """
    random = [metrics for name, metrics in baselines.items() if name.startswith("random-")]
    if not random:
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
