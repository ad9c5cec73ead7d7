"""The quantized prefix: every linear encoded on the inputs that the linears encoded before it give.

Two streams of states go through the layers for the fit windows, the source's and that of the encoded model. A layer's
dense linears are encoded here, in the order in which the stream meets them; its experts by the workers, on rows left
for them; then both streams advance. Each linear is fitted to give on the second stream what the source's gives on the
first (`keys35.calibration.correction`).
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from keys35.calibration.correction import PairedInputs
from keys35.calibration.statistics import MoeRows, inner
from keys35.calibration.windows import Windows
from keys35.errors import SourceError
from keys35.exl3.encode import LinearJob, encode_group
from keys35.exl3.linear import EncodedLinear, decode_weight
from keys35.files.atomic import load_tensors, save_tensors
from keys35.glm.block import LayerWeights, Observer
from keys35.glm.layer import mlp_inputs, route
from keys35.glm.names import Role, TensorRule
from keys35.glm.weights import Overlay
from keys35.stages.candidates import MixStore
from keys35.stages.capture import layer_weights, mtp_states, next_shares
from keys35.stages.dense import dense_weight, save_dense
from keys35.stages.expert_encoding import PrefixRows
from keys35.stages.job import Job
from keys35.stages.spans import Spans
from keys35.stages.states import States, read_states, save_states
from keys35.stages.units import dense_unit, layer_name, prefix_unit

STREAMS = SOURCE, QUANTIZED = "source", "quantized"
IN_ORDER = (
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("self_attn.q_b_proj", "self_attn.indexer.wq_b"),
    ("self_attn.o_proj",),
)
"""Attention's linears as a stream meets them; those of a group have the same input."""


def encode_behind_prefix(job: Job, layer: int, windows: Windows, allocation: dict[int, list[int]]) -> None:
    """A layer's dense linears one after another, and the rows that its experts are encoded on."""
    spent = Spans(job.device)
    with spent("reading"):
        streams = _states_before(job, layer, windows, allocation)
        weights = layer_weights(job, job.store, layer)  # not sooner: making states may have needed another's, or these
    encoder = _DenseEncoder(job, layer, weights, spent)
    for modules in IN_ORDER:
        if any(encoder.has(module) for module in modules):
            with spent("forward"):
                sums = _watched(job, layer, modules[0], streams, weights, encoder.weights)
            encoder.encode(modules, sums)
    with spent("forward"):
        passing = {SOURCE: weights, QUANTIZED: encoder.weights}
        streams = {name: states.advance(job.config, layer, passing[name], job.device, job.tokens_at_once,
                                        in_place=True, through=mlp_inputs) for name, states in streams.items()}
    _require_finite(layer, streams)
    hessian = _encode_mlp(job, layer, streams, encoder)
    more = {}
    if job.config.is_moe(layer):
        with spent("writing"):
            more = {"rows_sha256": _save_rows(job, layer, streams, weights, hessian)}
    save_dense(job, layer, encoder.encoded, **more)  # last: it declares the rows done, too
    job.work.log("dense-time", unit=dense_unit(layer), seconds=spent.facts())


class _DenseEncoder:
    """A layer's dense linears, encoded group by group; `weights` is the layer as far as it is encoded."""

    def __init__(self, job: Job, layer: int, weights: LayerWeights, spent: Spans) -> None:
        self._job, self._spent = job, spent
        self._rules = {rule.module.split(".", 3)[3]: rule for rule in job.rules.values()
                       if rule.layer == layer and rule.role is Role.DENSE}
        self.encoded: dict[str, EncodedLinear] = {}
        self._matrices: dict[str, Tensor] = {}
        self.weights = Overlay(weights, self._matrices)

    def has(self, module: str) -> bool:
        return module in self._rules

    def exact(self, module: str) -> Tensor:
        """The source's weight, float32 (in, out)."""
        return dense_weight(self._job, self._rules[module])

    def lossy(self, module: str) -> Tensor:
        """What it became."""
        return self._matrices[module]

    def encode(self, modules: tuple[str, ...], sums: PairedInputs) -> None:
        """Correct and encode those that the layer has of some linears with one input."""
        rules = [self._rules[module] for module in modules if module in self._rules]
        key, bits = rules[0].module, self._job.recipe.dense.bits
        with self._spent("Hessians"):
            jobs = [LinearJob(rule.module, sums.corrected(dense_weight(self._job, rule)), key) for rule in rules]
        with self._spent("encode"):
            found = encode_group(jobs, {key: sums.hessian()}, [bits], self._job.encode_options, self._job.recipe.seed)
        for rule in rules:
            self.encoded[rule.module] = found[rule.module, bits]
            self._matrices[rule.module.split(".", 3)[3]] = _decoded(rule, found[rule.module, bits])


def _decoded(rule: TensorRule, encoded: EncodedLinear) -> Tensor:
    matrix = decode_weight(encoded.trellis, encoded.suh, encoded.svh)
    return matrix[: rule.in_features, : rule.out_features].contiguous()


class _Inputs(Observer):
    """Keeps the rows that enter one linear, run by run; or pairs them with those of another that kept them before."""

    def __init__(self, module: str, first: int, sums: PairedInputs, before: "_Inputs | None" = None) -> None:
        self._module, self._first, self._sums, self._before = module, first, sums, before
        self.runs: deque[Tensor] = deque()

    def linear_input(self, modules: tuple[str, ...], rows: Tensor, where: Tensor) -> None:
        if self._module not in modules:
            return
        if self._before is None:
            self.runs.append(rows.float())
        else:
            half = (self._first + where[:, 0]) % 2 == 0
            self._sums.add(self._before.runs.popleft(), rows.float(), half.to(rows.device))


def _watched(
    job: Job, layer: int, module: str, streams: dict[str, States], exact: LayerWeights, lossy: LayerWeights
) -> PairedInputs:
    """What enters a linear of attention in both streams, a few windows at a time."""
    sums = PairedInputs()
    step = max(1, job.tokens_at_once // streams[SOURCE].x.shape[1])
    name = f"model.layers.{layer}.{module}"
    for first in range(0, len(streams[SOURCE].x), step):
        kept = _Inputs(name, first, sums)
        passes = ((SOURCE, exact, kept), (QUANTIZED, lossy, _Inputs(name, first, sums, kept)))
        for stream, weights, observer in passes:
            part = streams[stream].part(slice(first, first + step))
            part.advance(job.config, layer, weights, job.device, job.tokens_at_once, observer, through=mlp_inputs)
    return sums


def _encode_mlp(job: Job, layer: int, streams: dict[str, States], encoder: _DenseEncoder) -> Tensor:
    """The dense MLP or the shared expert, gate and up first; the mean x x^T of what enters it behind the prefix."""
    prefix = "mlp.shared_experts" if job.config.is_moe(layer) else "mlp"
    gate, up, down = (f"{prefix}.{leaf}_proj" for leaf in ("gate", "up", "down"))
    entering = PairedInputs()
    for source, found, half in _pairs(job, streams):
        entering.add(source, found, half)
    if not encoder.has(gate):
        return entering.hessian()
    encoder.encode((gate, up), entering)
    exact, lossy = ([weight(module) for module in (gate, up)] for weight in (encoder.exact, encoder.lossy))
    within = PairedInputs()
    for source, found, half in _pairs(job, streams):
        within.add(inner(source, *exact), inner(found, *lossy), half)
    encoder.encode((down,), within)
    return entering.hessian()


def _pairs(job: Job, streams: dict[str, States]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows of both streams (n, d), windows together, and which of them are in the first half."""
    count, length, _ = streams[SOURCE].x.shape
    step = max(1, job.tokens_at_once // length)
    for first in range(0, count, step):
        source, found = (streams[name].x[first : first + step].to(job.device).float().flatten(0, 1) for name in STREAMS)
        yield source, found, _half(range(first, min(first + step, count)), length).to(job.device)


def _half(windows: range, length: int) -> Tensor:
    """Neighbouring windows check one another: bool for each row."""
    return (torch.tensor(windows) % 2 == 0).repeat_interleave(length)


def _save_rows(job: Job, layer: int, streams: dict[str, States], weights: LayerWeights, hessian: Tensor) -> str:
    routed = [route(job.config, weights, found) for _, found, _ in _pairs(job, streams)]
    ids, router = (torch.cat(parts).cpu() for parts in zip(*routed, strict=True))
    fit = MoeRows(streams[QUANTIZED].x.flatten(0, 1), ids, router)
    tensors = fit.tensors("fit") | {"source": streams[SOURCE].x.flatten(0, 1), "hessian": hessian}
    tensors["half"] = _half(range(len(streams[SOURCE].x)), streams[SOURCE].x.shape[1])
    return save_tensors(prefix_rows_file(job, layer), tensors)


def prefix_rows(job: Job, layer: int) -> PrefixRows:
    """A layer's rows behind the quantized prefix; raises ResumeError if they are gone or damaged."""
    expected = job.work.require(dense_unit(layer))["data"]["rows_sha256"]
    tensors = load_tensors(prefix_rows_file(job, layer), expect_sha256=expected)
    return PrefixRows(MoeRows.from_tensors(tensors, "fit"), tensors["source"], tensors["half"], tensors["hessian"])


def advance_streams(job: Job, layer: int, windows: Windows, allocation: dict[int, list[int]]) -> None:
    """Both streams through a layer that is encoded, and onto disk in place of those before it."""
    after = _advanced(job, layer, _states_before(job, layer, windows, allocation), allocation)
    path = prefix_states_file(job, layer)
    # Not among the receipt's files: they are deleted when the next layer's are there.
    job.work.commit(prefix_unit(layer), [], {"sha256": save_states(path, after, next_shares(job, layer))})
    if layer:
        prefix_states_file(job, layer - 1).unlink(missing_ok=True)


def _advanced(
    job: Job, layer: int, streams: dict[str, States], allocation: dict[int, list[int]]
) -> dict[str, States]:
    encoded = MixStore(job, allocation, final=True).layer(layer)
    passing = {SOURCE: layer_weights(job, job.store, layer), QUANTIZED: encoded}
    after = {name: states.advance(job.config, layer, passing[name], job.device, job.tokens_at_once, in_place=True)
             for name, states in streams.items()}
    _require_finite(layer, after)
    return after


def _require_finite(layer: int, streams: dict[str, States]) -> None:
    """Refuse what no sum may hold; windows that the source alone breaks were dropped when it was measured."""
    for name, states in streams.items():
        if states.broken:
            raise SourceError(
                f"layer {layer} gives values that are not finite in {len(states.broken)} of {len(states.x)} fit "
                f"windows of the {name} prefix: use encoder.prefix = \"source\", or wider dense.bits"
            )


def _states_before(job: Job, layer: int, windows: Windows, allocation: dict[int, list[int]]) -> dict[str, States]:
    """Both streams as they enter a layer."""
    if layer == 0:
        return {name: States.embedded(job.store, windows.tokens, job.states_dtype) for name in STREAMS}
    streams = _states_after(job, min(layer, job.config.num_hidden_layers) - 1, windows, allocation)
    if not job.config.is_mtp(layer):
        return streams
    weights = layer_weights(job, job.store, layer)
    return {name: mtp_states(job, job.store, weights, streams[name], windows.tokens) for name in STREAMS}


def _states_after(job: Job, layer: int, windows: Windows, allocation: dict[int, list[int]]) -> dict[str, States]:
    """Both streams behind an encoded layer, from disk; computed again from the last ones kept if they are gone."""
    path, receipt = prefix_states_file(job, layer), job.work.receipt(prefix_unit(layer))
    if receipt is not None and path.exists():
        return read_states(load_tensors(path, expect_sha256=receipt["data"]["sha256"]), STREAMS)
    return _advanced(job, layer, _states_before(job, layer, windows, allocation), allocation)


def prefix_states_file(job: Job, layer: int) -> Path:
    """Both streams' states behind a layer."""
    return job.work.path("prefix", f"{layer_name(layer)}-states.safetensors")


def prefix_rows_file(job: Job, layer: int) -> Path:
    """Inputs of a layer's experts in both streams, kept until they are encoded."""
    return job.work.path("prefix", f"{layer_name(layer)}-rows.safetensors")
