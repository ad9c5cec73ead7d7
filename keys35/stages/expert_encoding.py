"""A batch of experts through the encoder: gate and up first, then each down projection to what those became."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from keys35.calibration.compensation import corrected_downs
from keys35.calibration.correction import PairedInputs
from keys35.calibration.statistics import MoeRows, expert_hessians, inner, row_weights
from keys35.exl3.encode import LinearJob, encode_group
from keys35.exl3.linear import EncodedLinear, decode_weight
from keys35.exl3.simulate import simulate_group
from keys35.glm.names import PROJECTIONS
from keys35.precision import vector_sum
from keys35.stages.job import Job
from keys35.stages.room import rows_home
from keys35.stages.spans import Spans

Weights = tuple[Tensor, Tensor, Tensor]  # gate, up, down; each (in, out) float32


@dataclass(frozen=True)
class LayerRows:
    """What a layer's experts are encoded on and judged on.

    fit shapes the Hessians; reached (experts,) says how many fit rows chose each, kept or not; selection (held out)
    carries the error; domain (T_selection,) says whose text a row is, half (T_selection,) on which side its window is
    when one half of the text checks the other.
    """

    fit: MoeRows
    reached: Tensor
    selection: MoeRows
    domain: Tensor
    half: Tensor
    domains: int
    hessian: Tensor  # mean x x^T of the layer's MoE input over all fit tokens

    @property
    def nbytes(self) -> int:
        """Of the inputs, which are all but a fraction."""
        return self.fit.x.nbytes + self.selection.x.nbytes

    def to(self, device: torch.device) -> "LayerRows":
        """The same rows on a device."""
        return LayerRows(
            self.fit.to(device), self.reached, self.selection.to(device), self.domain.to(device), self.half,
            self.domains, self.hessian.to(device),
        )


@dataclass(frozen=True)
class PrefixRows:
    """What experts are encoded on behind a quantized prefix: tokens as that routes them, and the source's inputs there.

    fit.x and source (T, d): inputs of the same tokens in both; fit.weights: what an expert's output counts for, by the
    router and the state that it is added to; missing (T, d): what the outputs are to make up for; half bool (T,): which
    tokens check the others' fit.
    """

    fit: MoeRows
    source: Tensor
    missing: Tensor
    half: Tensor
    hessian: Tensor  # mean x x^T of the layer's MoE input over all tokens

    @property
    def nbytes(self) -> int:
        """Of the inputs and what is missing, which are all but a fraction."""
        return self.fit.x.nbytes + self.source.nbytes + self.missing.nbytes

    def to(self, device: torch.device) -> "PrefixRows":
        """The same rows on a device."""
        parts = (part.to(device) for part in (self.source, self.missing, self.half, self.hessian))
        return PrefixRows(self.fit.to(device), *parts)


Rows = TypeVar("Rows", LayerRows, PrefixRows)


def at_hand(job: Job, rows: Rows) -> Rows:
    """Rows where the encoder will look for them."""
    home = rows_home(job, rows.nbytes)
    return rows if home.type == "cpu" else rows.to(home)


def expert_names(layer: int, expert: int) -> list[str]:
    """Module names of an expert's gate, up and down."""
    return [f"model.layers.{layer}.mlp.experts.{expert}.{leaf}" for leaf in PROJECTIONS]


def encode_weights(
    job: Job, layer: int, weights: dict[int, Weights], widths: Sequence[float],
    rows: LayerRows | PrefixRows, spent: Spans,
) -> tuple[dict[tuple[str, float], EncodedLinear], dict[int, tuple[int, float]]]:
    """Every linear of some experts at every width; by expert, the rows behind it and how far it leans on the layer's.

    Under `encoder.compensate` each width has a down projection of its own to encode.
    """
    with spent("Hessians"):
        jobs, hessians, facts = _encoder_input(job, layer, weights, rows)
    if not job.recipe.encoder.compensate:
        with spent("encode"):
            return encode_group(jobs, hessians, widths, job.encode_options, job.recipe.seed), facts
    downs = dict(zip(weights, jobs[2::3], strict=True))
    with spent("encode"):
        encoded = encode_group([*jobs[0::3], *jobs[1::3]], hessians, widths, job.encode_options, job.recipe.seed)
    with spent("Hessians"):
        targets = {e: _corrected(job, layer, e, parts, encoded, widths, rows) for e, parts in weights.items()}
    with spent("encode"):
        for width in widths:
            wanted = [replace(item, weight=targets[expert][width]) for expert, item in downs.items()]
            encoded |= encode_group(wanted, hessians, [width], job.encode_options, job.recipe.seed)
    return encoded, facts


def simulate_weights(
    job: Job, layer: int, weights: dict[int, Weights], width: float, rows: LayerRows, spent: Spans
) -> tuple[dict[int, Weights], dict[int, tuple[int, float]]]:
    """Experts as `encode_weights` would leave them at a width, without the search; and the same facts of each."""
    with spent("Hessians"):
        jobs, hessians, facts = _encoder_input(job, layer, weights, rows)

    def simulated(items: Sequence[LinearJob]) -> dict[str, Tensor]:
        with spent("simulation"):
            return simulate_group(items, hessians, width, job.encode_options, job.recipe.seed)

    lossy, downs = simulated([*jobs[0::3], *jobs[1::3]]), jobs[2::3]
    if job.recipe.encoder.compensate:
        with spent("Hessians"):
            for place, (expert, parts) in enumerate(weights.items()):
                pair = tuple(lossy[name] for name in expert_names(layer, expert)[:2])
                [wanted] = corrected_downs(rows.fit, expert, parts, {width: pair}, job.recipe.calibration).values()
                downs[place] = replace(downs[place], weight=wanted)
    lossy |= simulated(downs)
    return {expert: tuple(lossy[name] for name in expert_names(layer, expert)) for expert in weights}, facts


def _corrected(
    job: Job, layer: int, expert: int, weights: Weights, encoded: dict[tuple[str, float], EncodedLinear],
    widths: Sequence[float], rows: LayerRows | PrefixRows,
) -> dict[float, Tensor]:
    names = expert_names(layer, expert)[:2]
    parts = {width: [encoded[name, width] for name in names] for width in widths}
    lossy = {width: tuple(decode_weight(p.trellis, p.suh, p.svh) for p in pair) for width, pair in parts.items()}
    if isinstance(rows, PrefixRows):
        return {width: _paired(job, rows, expert, weights, pair).corrected(weights[2]) for width, pair in lossy.items()}
    return corrected_downs(rows.fit, expert, weights, lossy, job.recipe.calibration)


def _paired(
    job: Job, rows: PrefixRows, expert: int, weights: Weights, lossy: tuple[Tensor, Tensor] | None = None
) -> PairedInputs:
    """An expert's inputs in both prefixes; with gate and up as they were encoded, its down projection's and more."""
    index, router = rows.fit.of(expert)
    device, sums = weights[0].device, PairedInputs()
    weight = row_weights(router.to(device), job.recipe.calibration)
    if not vector_sum(weight) > 0:
        return sums
    source, found, missing = (x[index].to(device).float() for x in (rows.source, rows.fit.x, rows.missing))
    root, half = (weight / vector_sum(weight)).sqrt()[:, None], rows.half[index].to(device)
    if lossy:
        sums.add(inner(source, *weights[:2]) * root, inner(found, *lossy) * root, half, missing * root)
    else:
        sums.add(source * root, found * root, half)
    return sums


def _encoder_input(
    job: Job, layer: int, weights: dict[int, Weights], rows: LayerRows | PrefixRows
) -> tuple[list[LinearJob], dict[str, Tensor], dict[int, tuple[int, float]]]:
    """Linears, their Hessians, and by expert the rows behind them and how far they lean on the layer's."""
    jobs: list[LinearJob] = []
    hessians: dict[str, Tensor] = {}
    facts = {}
    for expert, (gate, up, down) in weights.items():
        if isinstance(rows, PrefixRows):
            gate, up = _paired(job, rows, expert, weights[expert]).corrected(torch.cat([gate, up], 1)).chunk(2, 1)
        found = expert_hessians(rows.fit, rows.hessian, expert, gate, up, job.recipe.calibration)
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        hessians |= {f"{prefix}.input": found.gate_up, f"{prefix}.inner": found.down}
        keys = [f"{prefix}.input", f"{prefix}.input", f"{prefix}.inner"]
        names = expert_names(layer, expert)
        jobs += [LinearJob(n, w, k) for n, w, k in zip(names, (gate, up, down), keys, strict=True)]
        reached = int(rows.reached[expert]) if isinstance(rows, LayerRows) else found.rows
        facts[expert] = reached, found.shrink
    return jobs, hessians, facts
