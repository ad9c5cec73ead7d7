"""The two streams of states that go through the layers of a quantized prefix: the source's, and what is encoded gives.

Both are of the fit windows; they are on disk behind one layer at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keys35.calibration.windows import Windows
from keys35.errors import SourceError
from keys35.files.atomic import load_tensors
from keys35.glm.block import LayerWeights
from keys35.glm.config import GlmConfig
from keys35.glm.layer import mlp_inputs
from keys35.stages.candidates import MixStore
from keys35.stages.capture import layer_weights, mtp_states, next_shares
from keys35.stages.job import Job
from keys35.stages.states import States, read_states, save_states
from keys35.stages.units import layer_name, prefix_unit

STREAMS = SOURCE, QUANTIZED = "source", "quantized"
SHARED = "mlp.shared_experts"
Streams = dict[str, States]


@dataclass(frozen=True)
class PairedRows:
    """Tokens (n) in both streams: MLP inputs (n, d), and how far the states that an MLP is added to lie apart.

    root (n, 1): of what a token counts for in a state's error, one over its size, since what reads a state divides
    by that; missing (n, d): the source's state less the quantized one, times root; half bool (n,): which tokens
    check the others' fit.
    """

    source: Tensor
    found: Tensor
    root: Tensor
    missing: Tensor
    half: Tensor


def lacking(config: GlmConfig, source: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Root and missing of `PairedRows` for states (.., d) of both streams."""
    root = torch.rsqrt(source.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return root, (source - found) * root


def paired_rows(job: Job, layer: int, streams: Streams, weights: LayerWeights) -> Iterator[PairedRows]:
    """Rows of both streams behind a layer's attention, a few windows at a time."""
    for some in windows_at_once(job, streams[SOURCE]):
        states = [rows_of(job, streams[name], some) for name in STREAMS]
        source, found = (mlp_inputs(job.config, layer, weights, x) for x in states)
        half = halves(some, streams[SOURCE].x.shape[1]).to(job.device)
        yield PairedRows(source, found, *lacking(job.config, *states), half)


def windows_at_once(job: Job, states: States) -> Iterator[range]:
    """The numbers of the windows, as many together as a device takes."""
    count, length, _ = states.x.shape
    step = max(1, job.tokens_at_once // length)
    return (range(first, min(first + step, count)) for first in range(0, count, step))


def rows_of(job: Job, states: States, windows: range) -> Tensor:
    """States of some windows, float32 (n, d) on the job's device."""
    return states.x[windows.start : windows.stop].to(job.device).float().flatten(0, 1)


def halves(windows: range, length: int) -> Tensor:
    """Neighbouring windows check one another: bool for each row."""
    return (torch.tensor(windows) % 2 == 0).repeat_interleave(length)


def states_before(job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]]) -> Streams:
    """Both streams as they enter a layer."""
    if layer == 0:
        return {name: States.embedded(job.store, windows.tokens, job.states_dtype) for name in STREAMS}
    streams = _states_after(job, min(layer, job.config.num_hidden_layers) - 1, windows, allocation)
    if not job.config.is_mtp(layer):
        return streams
    weights = layer_weights(job, job.store, layer, experts=False)
    return {name: mtp_states(job, job.store, weights, streams[name], windows.tokens) for name in STREAMS}


def keep_streams(job: Job, layer: int, after: Streams) -> None:
    """Both streams behind a layer onto disk, in place of those before it."""
    path = prefix_states_file(job, layer)
    # Not among the receipt's files: they are deleted when the next layer's are there.
    job.work.commit(prefix_unit(layer), [], {"sha256": save_states(path, after, next_shares(job, layer))})
    if layer:
        prefix_states_file(job, layer - 1).unlink(missing_ok=True)


def _states_after(job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]]) -> Streams:
    """Both streams behind an encoded layer, from disk; computed again from the last ones kept if they are gone."""
    path, receipt = prefix_states_file(job, layer), job.work.receipt(prefix_unit(layer))
    if receipt is not None and path.exists():
        return read_states(load_tensors(path, expect_sha256=receipt["data"]["sha256"]), STREAMS)
    before = states_before(job, layer, windows, allocation)
    source = advance_source(job, layer, before.pop(SOURCE))
    return {SOURCE: source, QUANTIZED: advance_quantized(job, layer, before.pop(QUANTIZED), allocation)}


def advance_source(job: Job, layer: int, before: States) -> States:
    """The source's stream behind a layer; the states before it are lost."""
    return through(job, layer, before, SOURCE, layer_weights(job, job.store, layer))


def advance_quantized(job: Job, layer: int, before: States, allocation: dict[int, list[float]]) -> States:
    """The quantized stream behind a layer that is encoded; the states before it are lost."""
    return through(job, layer, before, QUANTIZED, MixStore(job, allocation, final=True).layer(layer))


def through(job: Job, layer: int, before: States, stream: str, weights: LayerWeights) -> States:
    """A stream through a layer; the states before it are lost."""
    after = before.advance(job.config, layer, weights, job.device, job.tokens_at_once, in_place=True)
    require_finite(layer, {stream: after})
    return after


def require_finite(layer: int, streams: Streams) -> None:
    """Refuse what no sum may hold; windows that the source alone breaks were dropped when it was measured."""
    for name, states in streams.items():
        if states.broken:
            raise SourceError(
                f"layer {layer} gives values that are not finite in {len(states.broken)} of {len(states.x)} fit "
                f"windows of the {name} prefix: use encoder.prefix = \"source\", or wider dense.bits"
            )


def prefix_states_file(job: Job, layer: int) -> Path:
    """Both streams' states behind a layer."""
    return job.work.path("prefix", f"{layer_name(layer)}-states.safetensors")
