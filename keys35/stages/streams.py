"""The two streams of states that go through the layers of a quantized prefix: the source's, and what is encoded gives.

Both are of the fit windows. They are on disk behind one layer's attention at a time; what its MLP makes of them, a
driver that goes on has in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from keys35.calibration.windows import Windows
from keys35.errors import SourceError
from keys35.files.atomic import load_tensors
from keys35.glm.block import LayerWeights
from keys35.glm.config import GlmConfig
from keys35.glm.layer import behind_attention, behind_mlp, mlp_inputs
from keys35.stages.candidates import MixStore
from keys35.stages.capture import layer_weights, mtp_states, next_shares
from keys35.stages.job import Job
from keys35.stages.room import states_home
from keys35.stages.states import States, read_states, save_states
from keys35.stages.units import dense_unit, layer_name

STREAMS = SOURCE, QUANTIZED = "source", "quantized"
SHARED = "mlp.shared_experts"
Streams = dict[str, States]
Half = Callable[..., tuple[list[Tensor], list[Tensor | None]]]
"""`behind_attention` or `behind_mlp`."""


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


@dataclass
class Handed:
    """Streams in the memory of a driver that goes on: behind a layer's attention, and behind the layer.

    Those of one that was killed are read from disk, or made again from what is there.
    """

    attended: dict[int, Streams] = field(default_factory=dict)
    onward: dict[int, Streams] = field(default_factory=dict)


def states_before(
    job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]], handed: Handed | None = None
) -> Streams:
    """Both streams as they enter a layer."""
    home, mtp = states_home(job), job.config.is_mtp(layer)
    if layer == 0:
        return {name: States.embedded(job.store, windows.tokens, job.states_dtype).to(home) for name in STREAMS}
    previous, onward = min(layer, job.config.num_hidden_layers) - 1, handed.onward if handed else {}
    needed = mtp and layer + 1 in job.config.layers  # by the next MTP layer, whose input comes of the same states
    streams = (onward.get if needed else onward.pop)(previous, None)
    streams = streams or _states_after(job, previous, windows, allocation)
    if not mtp:
        return streams
    weights = layer_weights(job, job.store, layer, experts=False)
    return {name: mtp_states(job, job.store, weights, streams[name], windows.tokens).to(home) for name in STREAMS}


def keeping_attended(job: Job, layer: int, attended: Streams, pool: ThreadPoolExecutor) -> dict[str, Future[str]]:
    """Begin to write both streams behind a layer's attention; the SHA-256 of each one's file, for the dense receipt."""
    return {name: pool.submit(save_states, path, {name: attended[name]}, next_shares(job, layer))
            for name, path in attended_files(job, layer).items()}


def forget_attended(job: Job, layer: int) -> None:
    """Drop the streams behind a layer's attention; there may be none."""
    for path in attended_files(job, layer).values():
        path.unlink(missing_ok=True)


def _states_after(job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]]) -> Streams:
    """Both streams behind a layer that is encoded, from those behind its attention."""
    return _advanced(job, layer, states_attended(job, layer, windows, allocation), allocation, behind_mlp)


def states_attended(job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]]) -> Streams:
    """Both streams behind the attention of a layer whose dense linears are encoded, from disk or computed again."""
    files, expected = attended_files(job, layer), job.work.require(dense_unit(layer))["data"].get("attended_sha256")
    if expected and all(path.exists() for path in files.values()):
        kept = {name: read_states(tensors, [name])[name] for name, tensors in load_parts(files, expected).items()}
        return {name: states.to(states_home(job)) for name, states in kept.items()}
    return _advanced(job, layer, states_before(job, layer, windows, allocation), allocation, behind_attention)


def load_parts(files: Mapping[str, Path], expected: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
    """Tensors of each file, read side by side; raises ResumeError for one that has not the SHA-256 expected of it."""
    with ThreadPoolExecutor(len(files)) as pool:
        found = pool.map(lambda part: load_tensors(files[part], expect_sha256=expected[part]), files)
        return dict(zip(files, found, strict=True))


def _advanced(
    job: Job, layer: int, before: Streams, allocation: dict[int, list[float]], half: Half
) -> Streams:
    """Both streams through half of an encoded layer; the states before it are lost."""
    second = half is behind_mlp  # the first needs neither experts nor what is encoded behind them
    exact = layer_weights(job, job.store, layer, experts=second)
    source = through(job, layer, before.pop(SOURCE), SOURCE, exact, half)
    del exact  # a GPU has room for few layers
    store = MixStore(job, allocation, final=True, first=not second)
    lossy = store.layer(layer) if second else store.without_experts(layer)
    return {SOURCE: source, QUANTIZED: through(job, layer, before.pop(QUANTIZED), QUANTIZED, lossy, half)}


def through(job: Job, layer: int, before: States, stream: str, weights: LayerWeights, half: Half) -> States:
    """A stream through half of a layer; the states before it are lost."""
    after = before.advance(job.config, layer, weights, job.device, job.tokens_at_once, in_place=True, through=half)
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


def attended_files(job: Job, layer: int) -> dict[str, Path]:
    """Each stream's states behind a layer's attention, kept until the next layer's are."""
    return {name: job.work.path("prefix", f"{layer_name(layer)}-{name}.safetensors") for name in STREAMS}
