"""Behind a quantized prefix a shared expert's down projection is encoded last, once its layer's experts are.

Every token passes it, so it makes up for what the whole layer leaves its state lacking, as far as its inputs tell.
"""

from torch import Tensor

from keys35.calibration.correction import PairedInputs
from keys35.calibration.windows import Windows
from keys35.exl3.encode import LinearJob, encode_group
from keys35.glm.block import LayerWeights
from keys35.glm.layer import behind_attention, gated_mlp, mlp_inputs, routed_outputs
from keys35.precision import short_products
from keys35.stages.candidates import MixStore
from keys35.stages.capture import layer_weights
from keys35.stages.dense import dense_weight, save_dense
from keys35.stages.job import Job
from keys35.stages.spans import Spans
from keys35.stages.states import States
from keys35.stages.streams import (
    QUANTIZED,
    SOURCE,
    advance_quantized,
    halves,
    keep_streams,
    lacking,
    states_before,
    through,
)
from keys35.stages.units import dense_home, encoded_last, shared_unit

INNER = "mlp.shared_experts"


def finish_layer(job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]]) -> None:
    """Encode what comes last of a layer whose experts are encoded; both streams onward, where a layer follows."""
    before = states_before(job, layer, windows, allocation)
    source = through(job, layer, before.pop(SOURCE), SOURCE, layer_weights(job, job.store, layer))
    if encoded_last(job, layer) and job.work.receipt(shared_unit(layer)) is None:
        lossy = MixStore(job, allocation, final=True, first=True).layer(layer)
        _encode_down(job, layer, source, before[QUANTIZED], lossy)
        del lossy
    if layer + 1 in job.config.layers:
        found = advance_quantized(job, layer, before.pop(QUANTIZED), allocation)
        keep_streams(job, layer, {SOURCE: source, QUANTIZED: found})


def _encode_down(job: Job, layer: int, source: States, before: States, lossy: LayerWeights) -> None:
    """source: the source's states behind the layer; before: the quantized stream's as they enter it."""
    spent, bits = Spans(job.device), job.recipe.dense.bits
    rule = encoded_last(job, layer)
    with spent("reading"):
        weight = dense_weight(job, rule)
    with spent("forward"):
        sums = _sums(job, layer, source, before, lossy, weight)
    with spent("Hessians"):
        jobs = [LinearJob(rule.module, sums.corrected(weight), rule.module)]
        hessian = sums.finish()
    with spent("encode"):
        found = encode_group(jobs, {rule.module: hessian}, [bits], job.encode_options, job.recipe.seed)
    with spent("writing"):
        save_dense(job, dense_home(job, rule), {rule.module: found[rule.module, bits]})
    job.work.log("dense-time", unit=shared_unit(layer), seconds=spent.facts())


def _sums(
    job: Job, layer: int, source: States, before: States, lossy: LayerWeights, weight: Tensor
) -> PairedInputs:
    """Its inputs in the quantized stream, and what that lacks with its weight as the source has it."""
    sums, (count, length, _) = PairedInputs(), before.x.shape
    step = max(1, job.tokens_at_once // length)
    for first in range(0, count, step):
        part = before.part(slice(first, first + step))
        attended = part.advance(job.config, layer, lossy, job.device, job.tokens_at_once, through=behind_attention)
        wanted, state = (x.to(job.device).float().flatten(0, 1) for x in (source.x[first : first + step], attended.x))
        rows = mlp_inputs(job.config, layer, lossy, state)
        with short_products(job.device):
            inner = gated_mlp(rows, *(_linear(lossy, leaf) for leaf in ("gate", "up")), lambda x: x)
            found = state + routed_outputs(job.config, layer, lossy, rows) + inner @ weight
        root, missing = lacking(job.config, wanted, found)
        half = halves(range(first, min(first + step, count)), length).to(job.device)
        sums.add(inner * root, inner * root, half, missing)
    return sums


def _linear(weights: LayerWeights, leaf: str):
    return lambda x: weights.linear(f"{INNER}.{leaf}_proj", x)
