"""Behind a quantized prefix a shared expert's down projection is encoded last, once its layer's experts are.

Every token passes it, so it makes up for what the whole layer leaves its state lacking, as far as its inputs tell.
"""

from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from keys35.calibration.correction import PairedInputs
from keys35.calibration.windows import Windows
from keys35.exl3.encode import LinearJob, encode_group
from keys35.glm.block import LayerWeights
from keys35.glm.layer import behind_mlp, gated_mlp, mlp_inputs, mlp_linears, routed_outputs
from keys35.glm.names import TensorRule
from keys35.glm.weights import Overlay
from keys35.precision import short_products
from keys35.stages.candidates import MixStore
from keys35.stages.capture import layer_weights
from keys35.stages.dense import decoded_matrix, dense_weight, save_dense
from keys35.stages.job import Job
from keys35.stages.room import states_home
from keys35.stages.spans import Spans
from keys35.stages.states import States
from keys35.stages.streams import (
    QUANTIZED,
    SHARED,
    SOURCE,
    Handed,
    halves,
    lacking,
    rows_of,
    states_attended,
    through,
    windows_at_once,
)
from keys35.stages.units import dense_home, encoded_last, shared_unit

SHARED_DOWN = f"{SHARED}.down_proj"


def finish_layer(
    job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]], handed: Handed
) -> None:
    """Encode what comes last of a layer whose experts are encoded; both streams onward.

    handed: both streams behind attention, as `encode_behind_prefix` leaves them, which are lost; gets them behind the
    layer.
    """
    attended = handed.attended.pop(layer, None) or states_attended(job, layer, windows, allocation)
    last, done = encoded_last(job, layer), job.work.receipt(shared_unit(layer)) is not None
    read = MixStore(job, allocation, final=True, first=not done).layer
    with ThreadPoolExecutor(1, "encoded layer") as beside:
        roomy = states_home(job).type == "cuda"  # which has the memory for both, too
        # While the source's is read and passed; it takes no product, whose precision would be the other thread's.
        coming = beside.submit(read, layer) if roomy else None
        source = through(job, layer, attended.pop(SOURCE), SOURCE, layer_weights(job, job.store, layer), behind_mlp)
        lossy = coming.result() if coming else read(layer)
    if last and not done:
        matrix = _encode_down(job, last, source, attended[QUANTIZED], lossy)
        lossy = Overlay(lossy, {SHARED_DOWN: matrix})
    found = through(job, layer, attended.pop(QUANTIZED), QUANTIZED, lossy, behind_mlp)
    handed.onward = {layer: {SOURCE: source, QUANTIZED: found}}  # in place of any that nobody came for


def _encode_down(job: Job, rule: TensorRule, source: States, attended: States, lossy: LayerWeights) -> Tensor:
    """Encode the linear and keep it; what it became, (in, out).

    source: the source's states behind the layer; attended: the quantized stream's behind its attention.
    """
    spent, bits = Spans(job.device), job.recipe.dense.bits
    with spent("reading"):
        weight = dense_weight(job, rule)
    with spent("forward"):
        sums = _sums(job, rule.layer, source, attended, lossy, weight)
    with spent("Hessians"):
        jobs = [LinearJob(rule.module, sums.corrected(weight), rule.module)]
        hessian = sums.finish()
    with spent("encode"):
        found = encode_group(jobs, {rule.module: hessian}, [bits], job.encode_options, job.recipe.seed)
    with spent("writing"):
        save_dense(job, dense_home(job, rule), {rule.module: found[rule.module, bits]})
    job.work.log("dense-time", unit=shared_unit(rule.layer), seconds=spent.facts())
    return decoded_matrix(rule, found[rule.module, bits])


def _sums(
    job: Job, layer: int, source: States, attended: States, lossy: LayerWeights, weight: Tensor
) -> PairedInputs:
    """Its inputs in the quantized stream, and what that lacks with its weight as the source has it."""
    sums, (gate, up, _) = PairedInputs(), mlp_linears(lossy, SHARED)
    for some in windows_at_once(job, attended):
        state = rows_of(job, attended, some)
        rows = mlp_inputs(job.config, layer, lossy, state)
        with short_products(job.device):
            inner = gated_mlp(rows, gate, up, lambda x: x)
            found = state + routed_outputs(job.config, layer, lossy, rows) + inner @ weight
        root, missing = lacking(job.config, rows_of(job, source, some), found)
        inner = inner * root
        sums.add(inner, inner, halves(some, attended.x.shape[1]).to(job.device), missing)
    return sums
