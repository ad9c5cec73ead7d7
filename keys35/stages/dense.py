"""Dense EXL3 linears: a layer's fixed-width ones, encoded together from the Hessians of its calibration pass."""

import torch
from torch import Tensor

from keys35.errors import ResumeError
from keys35.exl3.encode import LinearJob, encode_group
from keys35.files.atomic import save_pieces
from keys35.glm.names import Role, TensorRule
from keys35.stages.capture import hessian_file
from keys35.stages.job import Job
from keys35.stages.spans import Spans
from keys35.stages.units import capture_unit, dense_file, dense_unit, load_recorded


def encode_dense(job: Job, layer: int) -> None:
    """All dense EXL3 linears of a layer at the recipe's width, from the Hessians of the calibration pass."""
    receipt = job.work.receipt(capture_unit(layer))
    if receipt is None:
        raise ResumeError(f"the calibration pass of layer {layer} is missing or damaged: run `keys35 measure` again")
    prefix = f"model.layers.{layer}."
    spent = Spans(job.device)
    with spent("reading"):
        stored = load_recorded(job, capture_unit(layer), hessian_file(job, layer))
    hessians = {prefix + key.removeprefix("hessian."): hessian for key, hessian in stored.items()}
    bits = job.recipe.dense.bits
    carrier = receipt["data"]["carrier"]
    with spent("reading"):
        jobs = [
            LinearJob(rule.module, _weight(job, rule), prefix + carrier[rule.module.removeprefix(prefix)])
            for rule in job.rules.values()
            if rule.layer == layer and rule.role is Role.DENSE
        ]
    with spent("encode"):
        encoded = encode_group(jobs, hessians, [bits], job.encode_options, job.recipe.seed)
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for item in jobs:
        result = encoded[item.name, bits]
        tensors |= result.tensors(item.name)
        errors[item.name] = result.proxy_error
    fallback = [item.name for item in jobs if encoded[item.name, bits].fallback]
    path = dense_file(job, layer)
    with spent("writing"):
        saved = save_pieces(path, tensors)
    job.work.commit(dense_unit(layer), {path: saved}, {"bits": bits, "proxy_error": errors, "fallback": fallback})
    job.work.log("dense-time", unit=dense_unit(layer), seconds=spent.facts())


def _weight(job: Job, rule: TensorRule) -> Tensor:
    """A linear's source weight as float32 (in, out), on the job's device."""
    return job.source.read(rule.source).to(job.device).to(torch.float32).T.contiguous()
