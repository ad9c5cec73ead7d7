"""The unit of work: a group of a layer's routed experts, encoded at some widths and judged at the layer's output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from keys35.calibration.statistics import MoeRows, expert_hessians
from keys35.exl3.encode import LinearJob, encode_group
from keys35.exl3.linear import EncodedLinear, decode_weight
from keys35.files.ahead import Ahead
from keys35.files.atomic import Saved
from keys35.glm.layer import gated_mlp
from keys35.glm.names import PROJECTIONS
from keys35.stages.job import Job
from keys35.stages.spans import Spans
from keys35.stages.unit_files import UnitFiles
from keys35.stages.units import ExpertUnit

Weights = tuple[Tensor, Tensor, Tensor]  # gate, up, down; each (in, out) float32
Batch = tuple[int, tuple[int, ...]]  # a layer and some of its experts
Reader = Ahead[dict[int, list[Tensor]]]


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
    job: Job, unit: ExpertUnit, widths: Sequence[int], keep: Sequence[int], rows: LayerRows, reader: Reader,
    following: ExpertUnit | None = None,
) -> None:
    """Encode a group at each width and commit what it costs; save one file for each width of `keep`.

    error[e][width][domain] is the mean over the domain's selection tokens of g^2 |f(x) - f_K(x)|^2 (zero for
    tokens routed elsewhere); error_se its standard error over rows; energy[e][domain] the same mean of g^2 |f(x)|^2.
    A GPU takes a batch of the group at a time: the next one's weights are read, and the last one's encodings written,
    while it works; behind the last batch the first one of the `following` unit is read.
    """
    spent = Spans(job.device)
    after = _batches(job, following.layer, following.experts)[0] if following else None
    found, written = _encode_all(job, unit, unit.experts, widths, keep, rows, spent, reader, after)
    held = {"held": {str(width): list(unit.experts) for width in keep}}
    data = _receipt(unit, widths, [found[expert] for expert in unit.experts]) | held
    job.work.commit(unit.name, written, data)
    job.work.log("experts-time", unit=unit.name, seconds=spent.facts())


def encode_chosen(
    job: Job, unit: ExpertUnit, chosen: Mapping[int, Sequence[int]], rows: LayerRows, reader: Reader
) -> None:
    """Encode experts of a measured group again at the widths chosen for them (width -> experts), and keep those.

    An encoding depends on nothing but its weight, Hessian, name and seed, so these are the bytes that `encode_experts`
    measured and did not keep.
    """
    files, data = job.work.recorded(unit.name), job.work.require(unit.name)["data"]
    spent = Spans(job.device)
    for width, experts in chosen.items():
        found, written = _encode_all(job, unit, experts, [width], [width], rows, spent, reader)
        files |= written
    held = data["held"] | {str(width): list(experts) for width, experts in chosen.items()}
    job.work.commit(unit.name, files, data | {"held": held})


def _encode_all(
    job: Job, unit: ExpertUnit, experts: Sequence[int], widths: Sequence[int], keep: Sequence[int], rows: LayerRows,
    spent: Spans, reader: Reader, after: Batch | None = None,
) -> tuple[dict[int, "Encoded"], dict[Path, Saved]]:
    """Some of a group's experts at some widths, batch by batch; what is to be said of each, and the files of `keep`."""
    found: dict[int, Encoded] = {}
    shape = job.config.hidden_size, job.config.moe_intermediate_size
    shapes = {name: shape[::-1] if name.endswith("down_proj") else shape
              for expert in experts for name in _names(unit.layer, expert)}
    batches = _batches(job, unit.layer, experts)
    with UnitFiles({width: unit.file(job, width) for width in keep}, shapes) as files:
        for batch, then in zip(batches, [*batches[1:], after], strict=True):
            with spent("reading"):
                weights = {expert: _on_device(job, parts) for expert, parts in reader.take(batch, then).items()}
            found |= _encode_batch(job, unit.layer, weights, widths, rows, files, spent)
        with spent("writing"):
            return found, files.finish()


@dataclass(frozen=True)
class Encoded:
    """What a receipt says of one expert; errors are (widths, domains), energy (domains,), proxy errors
    (widths, projections).
    """

    fit_rows: int
    shrink: float
    selection_rows: int
    error: list[list[float]]
    error_se: list[list[float]]
    energy: list[float]
    proxy_error: list[list[float]]
    fallback: list[str]


def _batches(job: Job, layer: int, experts: Sequence[int]) -> list[Batch]:
    """Experts as they advance through the encoder together, in the order in which they are written."""
    order = sorted(experts, key=str)
    pair = 2 * job.config.hidden_size * job.config.moe_intermediate_size
    most = max(1, job.encode_options.stack_elements // pair)
    return [(layer, tuple(order[first : first + most])) for first in range(0, len(order), most)]


class Shelf:
    """What a worker finds ready in this process: a layer's rows, and batches of experts that were read before."""

    def __init__(self, job: Job) -> None:
        self.rows: dict[int, LayerRows] = {}
        self.reader: Reader = Ahead(partial(_read_batch, job, job.device.type == "cuda"))

    def expect(self, job: Job, unit: ExpertUnit) -> None:
        """Begin to read what a unit begins with."""
        self.reader.begin(_batches(job, unit.layer, unit.experts)[0])


def _read_batch(job: Job, pinned: bool, batch: Batch) -> dict[int, list[Tensor]]:
    """Experts' projections as the source has them; in pinned memory where a GPU will fetch them."""
    layer, experts = batch
    return {e: [job.source.read(f"{name}.weight", pinned) for name in _names(layer, e)] for e in experts}


def _on_device(job: Job, parts: Sequence[Tensor]) -> Weights:
    return tuple(part.to(job.device, non_blocking=True).float().T.contiguous() for part in parts)


def _encode_batch(
    job: Job, layer: int, weights: dict[int, Weights], widths: Sequence[int], rows: LayerRows, files: UnitFiles,
    spent: Spans,
) -> dict[int, Encoded]:
    with spent("Hessians"):
        jobs, hessians, facts = _encoder_input(job, layer, weights, rows)
    with spent("encode"):
        encoded = encode_group(jobs, hessians, widths, job.encode_options, job.recipe.seed)
    for item in jobs:
        for width in files.widths:
            files.give(item.name, encoded[item.name, width])
    with spent("judging"):
        judged = {e: _judge(layer, e, parts, encoded, widths, rows) for e, parts in weights.items()}
    return {
        expert: Encoded(
            *facts[expert],
            *judged[expert],
            [[encoded[name, width].proxy_error for name in _names(layer, expert)] for width in widths],
            [name for name in _names(layer, expert) if encoded[name, widths[0]].fallback],
        )
        for expert in weights
    }


def _receipt(unit: ExpertUnit, widths: Sequence[int], experts: Sequence[Encoded]) -> dict[str, object]:
    return {
        "experts": list(unit.experts),
        "widths": list(widths),
        "fit_rows": [e.fit_rows for e in experts],
        "shrink": [e.shrink for e in experts],
        "selection_rows": [e.selection_rows for e in experts],
        "error": [e.error for e in experts],
        "error_se": [e.error_se for e in experts],
        "energy": [e.energy for e in experts],
        "proxy_error": {str(width): [e.proxy_error[i] for e in experts] for i, width in enumerate(widths)},
        "fallback": sorted(name for e in experts for name in e.fallback),
    }


def _names(layer: int, expert: int) -> list[str]:
    return [f"model.layers.{layer}.mlp.experts.{expert}.{leaf}" for leaf in PROJECTIONS]


def _encoder_input(
    job: Job, layer: int, weights: dict[int, Weights], rows: LayerRows
) -> tuple[list[LinearJob], dict[str, Tensor], dict[int, tuple[int, float]]]:
    """Linears, their Hessians, and by expert the rows behind them and how far they lean on the layer's."""
    jobs: list[LinearJob] = []
    hessians: dict[str, Tensor] = {}
    facts = {}
    for expert, (gate, up, down) in weights.items():
        found = expert_hessians(rows.fit, rows.hessian, expert, gate, up, job.recipe.calibration)
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        hessians |= {f"{prefix}.input": found.gate_up, f"{prefix}.inner": found.down}
        names = _names(layer, expert)
        keys = [f"{prefix}.input", f"{prefix}.input", f"{prefix}.inner"]
        jobs += [LinearJob(n, w, k) for n, w, k in zip(names, (gate, up, down), keys, strict=True)]
        facts[expert] = found.rows, found.shrink
    return jobs, hessians, facts


def _judge(
    layer: int,
    expert: int,
    weights: Weights,
    encoded: dict[tuple[str, float], EncodedLinear],
    widths: Sequence[int],
    rows: LayerRows,
) -> tuple[int, list[list[float]], list[list[float]], list[float]]:
    """Rows, errors, standard errors and output energy of one expert on the selection rows routed to it."""
    index, router = rows.selection.of(expert)
    x, domain = rows.selection.x[index].to(weights[0].device).float(), rows.domain[index].cpu()
    router = router.to(x.device)
    tokens = torch.bincount(rows.domain, minlength=rows.domains).double().cpu()
    exact = apply_expert(x, weights)
    errors, spreads = [], []
    for width in widths:
        parts = [encoded[name, width] for name in _names(layer, expert)]
        decoded = tuple(decode_weight(p.trellis, p.suh, p.svh) for p in parts)
        delta = apply_expert(x, decoded) - exact
        # Summed on the host: a GPU's weighted bincount adds in any order.
        per_row = (router.double().square() * delta.double().square().sum(dim=1)).cpu()
        sums = [torch.bincount(domain, power, rows.domains) for power in (per_row, per_row.square())]
        errors.append((sums[0] / tokens).tolist())
        spreads.append((sums[1].sqrt() / tokens).tolist())
    power = (router.double().square() * exact.double().square().sum(dim=1)).cpu()
    return len(index), errors, spreads, (torch.bincount(domain, power, rows.domains) / tokens).tolist()


def apply_expert(x: Tensor, weights: Weights) -> Tensor:
    """down(silu(gate x) * up x) with weights (in, out)."""
    gate, up, down = weights
    return gated_mlp(x, lambda v: v @ gate, lambda v: v @ up, lambda v: v @ down)
