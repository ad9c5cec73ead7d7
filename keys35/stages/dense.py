"""Dense EXL3 linears: a layer's fixed-width ones, encoded together from the Hessians of its calibration pass."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from keys35.errors import ResumeError
from keys35.exl3.encode import LinearJob, encode_group
from keys35.exl3.linear import EncodedLinear, decode_weight
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
            LinearJob(rule.module, dense_weight(job, rule), prefix + carrier[rule.module.removeprefix(prefix)])
            for rule in job.rules.values()
            if rule.layer == layer and rule.role is Role.DENSE
        ]
    with spent("encode"):
        encoded = encode_group(jobs, hessians, [bits], job.encode_options, job.recipe.seed)
    with spent("writing"):
        found = {item.name: encoded[item.name, bits] for item in jobs}
        save_dense(job, (dense_unit(layer), dense_file(job, layer)), found)
    job.work.log("dense-time", unit=dense_unit(layer), seconds=spent.facts())


def save_dense(job: Job, home: tuple[str, Path], encoded: Mapping[str, EncodedLinear], **more: object) -> None:
    """Write a layer's dense linears and declare them done (home: receipt and file); `more` goes into the receipt."""
    tensors: dict[str, Tensor] = {}
    for name, linear in encoded.items():
        tensors |= linear.tensors(name)
    errors = {name: linear.proxy_error for name, linear in encoded.items()}
    fallback = [name for name, linear in encoded.items() if linear.fallback]
    unit, path = home
    files = {path: save_pieces(path, tensors)} if tensors else {}
    facts = {"bits": job.recipe.dense.bits, "proxy_error": errors, "fallback": fallback}
    job.work.commit(unit, files, facts | more)


def dense_weight(job: Job, rule: TensorRule) -> Tensor:
    """A linear's source weight as float32 (in, out), on the job's device."""
    return job.source.read(rule.source).to(job.device).to(torch.float32).T.contiguous()


def decoded_matrix(rule: TensorRule, encoded: EncodedLinear) -> Tensor:
    """What a linear became, (in, out) without its padding."""
    matrix = decode_weight(encoded.trellis, encoded.suh, encoded.svh)
    return matrix[: rule.in_features, : rule.out_features].contiguous()
