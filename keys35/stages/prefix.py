"""The quantized prefix: every linear encoded on the inputs that the linears encoded before it give.

Two streams of states go through the layers for the fit windows, the source's and that of the encoded model. A layer's
dense linears are encoded here, in the order in which the stream meets them, which takes both streams behind attention;
its experts by the workers, on rows left for them; then both streams advance (`keys35.stages.shared`). Each linear is
fitted to give on the second stream what the source's gives on the first (`keys35.calibration.correction`), and one
whose output is added to the state to leave the source's state: it makes up for what the second stream lacks by then.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from keys35.calibration.correction import PairedInputs
from keys35.calibration.statistics import inner
from keys35.calibration.windows import Windows
from keys35.exl3.encode import LinearJob, encode_group
from keys35.exl3.linear import EncodedLinear
from keys35.glm.block import LayerWeights, Observer
from keys35.glm.layer import behind_attention
from keys35.glm.names import Role
from keys35.glm.weights import Overlay
from keys35.stages.background import saving
from keys35.stages.capture import layer_weights
from keys35.stages.dense import decoded_matrix, dense_weight, save_dense
from keys35.stages.expert_encoding import PrefixRows
from keys35.stages.experts import Shelf
from keys35.stages.job import Job
from keys35.stages.prefix_rows import entering, make_rows, saving_rows
from keys35.stages.spans import Spans
from keys35.stages.states import States
from keys35.stages.streams import (
    QUANTIZED,
    SHARED,
    SOURCE,
    STREAMS,
    Handed,
    Streams,
    forget_attended,
    keeping_attended,
    lacking,
    paired_rows,
    require_finite,
    states_before,
    through,
    windows_at_once,
)
from keys35.stages.units import dense_file, dense_unit

IN_ORDER = (
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("self_attn.q_b_proj", "self_attn.indexer.wq_b"),
)
"""Attention's linears as a stream meets them, before it mixes values; those of a group have the same input."""
MIXED = "self_attn.o_proj"
"""The one behind them, which writes to the state."""


def encode_behind_prefix(
    job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]], handed: Handed,
    shelf: Shelf | None = None,
) -> Callable[[], None]:
    """A layer's dense linears one after another, and the rows that its experts are encoded on.

    The files are written in the background, and the unit is finished when they are: what is returned waits for that. A
    shelf gets the rows for whoever encodes on them in this process; handed gets both streams behind attention, for
    `finish_layer`, and they are kept on disk, too, unless nothing follows.
    """
    spent = Spans(job.device)
    with spent("reading"):
        streams = states_before(job, layer, windows, allocation, handed)
        # Not sooner: making states may have needed another layer's. Its experts are the workers' to read.
        weights = layer_weights(job, job.store, layer, experts=False)
    encoder = _DenseEncoder(job, layer, weights, spent)
    streams = _behind_attention(job, layer, streams, weights, encoder, spent)
    hessian, rows = _encode_mlp(job, layer, streams, encoder), None
    if job.config.is_moe(layer):
        with spent("forward"):
            rows = make_rows(job, layer, streams, weights, encoder.weights, hessian, shelf)
    job.work.log("dense-time", unit=dense_unit(layer), seconds=spent.facts())
    attended = None
    if not job.config.is_mtp(layer):
        handed.attended = {layer: streams}  # in place of any that nobody came for
        attended = streams
    return saving(job, dense_unit(layer), "dense-saved", partial(_save, job, layer, encoder.encoded, rows, attended))


def _save(
    job: Job, layer: int, encoded: dict[str, EncodedLinear], rows: PrefixRows | None, attended: Streams | None
) -> None:
    """Rows and states first, side by side: the dense linears' receipt declares them done, too."""
    with ThreadPoolExecutor(5) as pool:
        parts = {}
        if rows is not None:
            parts["rows_sha256"] = saving_rows(job, layer, rows, pool)
        if attended is not None:
            parts["attended_sha256"] = keeping_attended(job, layer, attended, pool)
    more = {kind: {name: found.result() for name, found in files.items()} for kind, files in parts.items()}
    save_dense(job, (dense_unit(layer), dense_file(job, layer)), encoded, **more)
    if attended is not None and layer:
        forget_attended(job, layer - 1)


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

    def encode(self, modules: tuple[str, ...], sums: PairedInputs) -> Tensor:
        """Correct and encode those that the layer has of some linears with one input; their Hessian.

        The sums are lost.
        """
        rules = [self._rules[module] for module in modules if module in self._rules]
        key, bits = rules[0].module, self._job.recipe.dense.bits
        with self._spent("Hessians"):
            jobs = [LinearJob(rule.module, sums.corrected(dense_weight(self._job, rule)), key) for rule in rules]
            hessian = sums.finish()
        with self._spent("encode"):
            found = encode_group(jobs, {key: hessian}, [bits], self._job.encode_options, self._job.recipe.seed)
        for rule in rules:
            self.encoded[rule.module] = found[rule.module, bits]
            self._matrices[rule.module.split(".", 3)[3]] = decoded_matrix(rule, found[rule.module, bits])
        return hessian


class _Inputs(Observer):
    """Keeps the rows that enter one linear, run by run; or pairs them with those of another that kept them before."""

    def __init__(
        self, module: str, first: int, sums: PairedInputs, before: "_Inputs | None" = None,
        beside: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """beside: root (N, W, 1) and missing (N, W, d) of the windows' states, for a linear that writes to them."""
        self._module, self._first, self._sums, self._before, self._beside = module, first, sums, before, beside
        self.runs: deque[Tensor] = deque()

    def linear_input(self, modules: tuple[str, ...], rows: Tensor, where: Tensor) -> None:
        if self._module not in modules:
            return
        if self._before is None:
            self.runs.append(rows.float())
            return
        half = ((self._first + where[:, 0]) % 2 == 0).to(rows.device)
        source, found = self._before.runs.popleft(), rows.float()
        if self._beside is None:
            self._sums.add(source, found, half)
        else:
            root, missing = (part[where.unbind(1)] for part in self._beside)
            self._sums.add(source * root, found * root, half, missing)


def _behind_attention(
    job: Job, layer: int, streams: Streams, exact: LayerWeights, encoder: _DenseEncoder, spent: Spans
) -> Streams:
    """Both streams behind attention, whose linears are encoded on the way; the states before it are lost."""
    for modules in IN_ORDER:
        if any(encoder.has(module) for module in modules):
            with spent("forward"):
                sums = _watched(job, layer, modules[0], streams, exact, encoder.weights)
            encoder.encode(modules, sums)
    if encoder.has(MIXED):
        with spent("forward"):
            sums, source = _mixed(job, layer, streams, exact, encoder.weights)
        require_finite(layer, {SOURCE: source})
        encoder.encode((MIXED,), sums)
    with spent("forward"):
        if not encoder.has(MIXED):
            source = through(job, layer, streams[SOURCE], SOURCE, exact, behind_attention)
        found = through(job, layer, streams[QUANTIZED], QUANTIZED, encoder.weights, behind_attention)
    return {SOURCE: source, QUANTIZED: found}


def _watched(
    job: Job, layer: int, module: str, streams: Streams, exact: LayerWeights, lossy: LayerWeights
) -> PairedInputs:
    """What enters a linear of attention in both streams, a few windows at a time."""
    sums, name = PairedInputs(), f"model.layers.{layer}.{module}"
    for some in windows_at_once(job, streams[SOURCE]):
        kept = _Inputs(name, some.start, sums)
        passes = ((SOURCE, exact, kept), (QUANTIZED, lossy, _Inputs(name, some.start, sums, kept)))
        for stream, weights, observer in passes:
            part = streams[stream].part(slice(some.start, some.stop))
            part.show_attention(job.config, layer, weights, job.device, job.tokens_at_once, observer, mixed=False)
    return sums


def _mixed(
    job: Job, layer: int, streams: Streams, exact: LayerWeights, lossy: LayerWeights
) -> tuple[PairedInputs, States]:
    """What enters `o_proj` in both streams, and the source's behind attention: nothing of it waits to be encoded.

    The source's states before it are lost, a few windows at a time.
    """
    sums, name, onward = PairedInputs(), f"model.layers.{layer}.{MIXED}", []
    for some in windows_at_once(job, streams[SOURCE]):
        source, found = (streams[stream].part(slice(some.start, some.stop)) for stream in STREAMS)
        beside = lacking(job.config, *(part.x.to(job.device).float() for part in (source, found)))
        kept = _Inputs(name, some.start, sums)
        onward.append(source.advance(job.config, layer, exact, job.device, job.tokens_at_once, kept, in_place=True,
                                     through=behind_attention))
        paired = _Inputs(name, some.start, sums, kept, beside)
        found.show_attention(job.config, layer, lossy, job.device, job.tokens_at_once, paired, mixed=True)
    return sums, streams[SOURCE].joined(onward)


def _encode_mlp(job: Job, layer: int, streams: Streams, encoder: _DenseEncoder) -> Tensor:
    """The dense MLP or the shared expert, gate and up first; the mean x x^T of what enters it behind the prefix."""
    gate, up, down = (f"{_mlp_of(job, layer)}.{leaf}_proj" for leaf in ("gate", "up", "down"))
    inputs = entering(job, layer, streams, encoder.weights)
    if not encoder.has(gate):
        return inputs.finish()
    hessian = encoder.encode((gate, up), inputs)
    exact, lossy = ([weight(module) for module in (gate, up)] for weight in (encoder.exact, encoder.lossy))
    within = PairedInputs()
    for rows in paired_rows(job, layer, streams, encoder.weights):
        source, found = inner(rows.source, *exact), inner(rows.found, *lossy)
        within.add(source * rows.root, found * rows.root, rows.half, rows.missing)
    encoder.encode((down,), within)
    return hessian


def _mlp_of(job: Job, layer: int) -> str:
    """The MLP that every token passes."""
    return SHARED if job.config.is_moe(layer) else "mlp"
