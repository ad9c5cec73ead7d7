"""The unit of work: a group of a layer's routed experts, encoded at some widths and judged at the layer's output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keys35.calibration.statistics import MoeRows, expert_hessians
from keys35.exl3.encode import LinearJob, encode_group
from keys35.exl3.linear import EncodedLinear, decode_weight
from keys35.files.atomic import Saved, save_pieces
from keys35.glm.layer import gated_mlp
from keys35.glm.names import PROJECTIONS
from keys35.stages.job import Job
from keys35.stages.units import ExpertUnit

Weights = tuple[Tensor, Tensor, Tensor]  # gate, up, down; each (in, out) float32


@dataclass(frozen=True)
class LayerRows:
    """What a layer's experts are encoded on and judged on.

    fit shapes the Hessians; selection (held out) carries the error; domain (T_selection,) says whose text a row is.
    """

    fit: MoeRows
    selection: MoeRows
    domain: Tensor
    domains: int
    hessian: Tensor  # mean x x^T of the layer's MoE input over all fit tokens

    def to(self, device: torch.device) -> "LayerRows":
        """The same rows on a device."""
        return LayerRows(
            self.fit.to(device), self.selection.to(device), self.domain.to(device), self.domains,
            self.hessian.to(device),
        )


def encode_experts(
    job: Job, unit: ExpertUnit, widths: Sequence[int], keep: Sequence[int], rows: LayerRows
) -> None:
    """Encode a group at each width and commit what it costs; save one file for each width of `keep`.

    error[e][width][domain] is the mean over the domain's selection tokens of g^2 |f(x) - f_K(x)|^2 (zero for
    tokens routed elsewhere); error_se its standard error over rows.
    """
    weights = {expert: read_expert(job, unit.layer, expert) for expert in unit.experts}
    jobs, hessians, facts = _encoder_input(job, unit, weights, rows)
    encoded = encode_group(jobs, hessians, widths, job.encode_options, job.recipe.seed)
    files = {unit.file(job, width): _save(unit.file(job, width), jobs, encoded, width) for width in keep}
    judged = [_judge(job, unit, expert, weights[expert], encoded, widths, rows) for expert in unit.experts]
    data = {
        "experts": list(unit.experts),
        "widths": list(widths),
        "held": {str(width): list(unit.experts) for width in keep},
        **facts,
        "selection_rows": [entry[0] for entry in judged],
        "error": [entry[1] for entry in judged],
        "error_se": [entry[2] for entry in judged],
        "proxy_error": {
            str(width): [[encoded[name, width].proxy_error for name in _names(unit.layer, e)] for e in unit.experts]
            for width in widths
        },
        "fallback": sorted({item.name for item in jobs if encoded[item.name, widths[0]].fallback}),
    }
    job.work.commit(unit.name, files, data)


def encode_chosen(job: Job, unit: ExpertUnit, chosen: Mapping[int, Sequence[int]], rows: LayerRows) -> None:
    """Encode experts of a measured group again at the widths chosen for them (width -> experts), and keep those.

    An encoding depends on nothing but its weight, Hessian, name and seed, so these are the bytes that `encode_experts`
    measured and did not keep.
    """
    files, data = job.work.recorded(unit.name), job.work.require(unit.name)["data"]
    for width, experts in chosen.items():
        weights = {expert: read_expert(job, unit.layer, expert) for expert in experts}
        jobs, hessians, _ = _encoder_input(job, unit, weights, rows)
        encoded = encode_group(jobs, hessians, [width], job.encode_options, job.recipe.seed)
        files[unit.file(job, width)] = _save(unit.file(job, width), jobs, encoded, width)
    held = data["held"] | {str(width): list(experts) for width, experts in chosen.items()}
    job.work.commit(unit.name, files, data | {"held": held})


def _save(
    path: Path, jobs: Sequence[LinearJob], encoded: Mapping[tuple[str, float], EncodedLinear], width: int
) -> Saved:
    tensors: dict[str, Tensor] = {}
    for item in jobs:
        tensors |= encoded[item.name, width].tensors(item.name)
    return save_pieces(path, tensors)


def read_expert(job: Job, layer: int, expert: int) -> Weights:
    """An expert's projections from the source as float32 (in, out), on the job's device."""
    stored = (job.source.read(f"{name}.weight").to(job.device) for name in _names(layer, expert))
    return tuple(weight.float().T.contiguous() for weight in stored)


def _names(layer: int, expert: int) -> list[str]:
    return [f"model.layers.{layer}.mlp.experts.{expert}.{leaf}" for leaf in PROJECTIONS]


def _encoder_input(
    job: Job, unit: ExpertUnit, weights: dict[int, Weights], rows: LayerRows
) -> tuple[list[LinearJob], dict[str, Tensor], dict[str, list]]:
    jobs: list[LinearJob] = []
    hessians: dict[str, Tensor] = {}
    counts, shrinks = [], []
    for expert, (gate, up, down) in weights.items():
        found = expert_hessians(rows.fit, rows.hessian, expert, gate, up, job.recipe.calibration)
        prefix = f"model.layers.{unit.layer}.mlp.experts.{expert}"
        hessians |= {f"{prefix}.input": found.gate_up, f"{prefix}.inner": found.down}
        names = _names(unit.layer, expert)
        keys = [f"{prefix}.input", f"{prefix}.input", f"{prefix}.inner"]
        jobs += [LinearJob(n, w, k) for n, w, k in zip(names, (gate, up, down), keys, strict=True)]
        counts.append(found.rows)
        shrinks.append(found.shrink)
    return jobs, hessians, {"fit_rows": counts, "shrink": shrinks}


def _judge(
    job: Job,
    unit: ExpertUnit,
    expert: int,
    weights: Weights,
    encoded: dict[tuple[str, float], EncodedLinear],
    widths: Sequence[int],
    rows: LayerRows,
) -> tuple[int, list[list[float]], list[list[float]]]:
    """Rows, errors and standard errors of one expert on the selection rows routed to it."""
    index, router = rows.selection.of(expert)
    x, domain = rows.selection.x[index], rows.domain[index].cpu()
    tokens = torch.bincount(rows.domain, minlength=rows.domains).double().cpu()
    exact = apply_expert(x, weights)
    errors, spreads = [], []
    for width in widths:
        parts = [encoded[name, width] for name in _names(unit.layer, expert)]
        decoded = tuple(decode_weight(p.trellis, p.suh, p.svh) for p in parts)
        delta = apply_expert(x, decoded) - exact
        # Summed on the host: a GPU's weighted bincount adds in any order.
        per_row = (router.double().square() * delta.double().square().sum(dim=1)).cpu()
        sums = [torch.bincount(domain, power, rows.domains) for power in (per_row, per_row.square())]
        errors.append((sums[0] / tokens).tolist())
        spreads.append((sums[1].sqrt() / tokens).tolist())
    return len(index), errors, spreads


def apply_expert(x: Tensor, weights: Weights) -> Tensor:
    """down(silu(gate x) * up x) with weights (in, out)."""
    gate, up, down = weights
    return gated_mlp(x, lambda v: v @ gate, lambda v: v @ up, lambda v: v @ down)
