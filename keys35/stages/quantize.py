"""Quantize: everything at its final width. Experts that `measure` encoded are selected, the rest is encoded now."""

from functools import lru_cache

import torch
from torch import Tensor

from keys35.errors import ResumeError
from keys35.exl3.encode import LinearJob, encode_group
from keys35.files.atomic import save_tensors
from keys35.glm.names import Role, TensorRule
from keys35.progress import Progress
from keys35.stages.allocate import load_allocation
from keys35.stages.experts import encode_experts
from keys35.stages.job import Job
from keys35.stages.measure import calibration_windows, hessian_file, layer_rows, rows_file
from keys35.stages.units import ExpertUnit, capture_unit, dense_file, dense_unit, expert_units, load_recorded


def quantize(job: Job, progress: Progress) -> None:
    """Encode fixed-width linears and MTP experts, and any expert whose allocated width has no encoding yet."""
    allocation = load_allocation(job)
    windows = calibration_windows(job)
    store = job.store
    rows = lru_cache(maxsize=1)(lambda layer: layer_rows(job, store, layer, windows))
    dense = {rule.layer for rule in job.rules.values() if rule.role is Role.DENSE}
    steps = [(layer, unit) for layer in job.config.layers
             for unit in [*([None] if layer in dense else []), *_expert_units(job, layer)]]
    for step in progress.walk("quantize", steps, _note):
        layer, unit = step.unit
        if unit is None:
            step.kept = job.work.receipt(dense_unit(layer)) is not None
            if not step.kept:
                _encode_dense(job, layer)
            continue
        widths = _widths(job, unit, allocation)
        receipt = job.work.receipt(unit.name)
        step.kept = receipt is not None and set(receipt["data"]["widths"]) >= set(widths)
        if not step.kept:
            encode_experts(job, unit, widths, rows(layer))
        if unit == expert_units(job, layer)[-1]:
            rows_file(job, layer).unlink(missing_ok=True)


def _expert_units(job: Job, layer: int) -> list[ExpertUnit]:
    return expert_units(job, layer) if job.config.is_moe(layer) else []


def _note(step: tuple[int, ExpertUnit | None]) -> str:
    layer, unit = step
    return f"layer {layer}: dense linears" if unit is None else f"layer {layer}: experts {unit.experts.start}+"


def _widths(job: Job, unit: ExpertUnit, allocation: dict[int, list[int]]) -> list[int]:
    """What a unit must hold: its measured candidates (one of them is chosen), or the MTP experts' one width."""
    if job.config.is_mtp(unit.layer):
        return [job.recipe.mtp.bits]
    chosen = {allocation[unit.layer][expert] for expert in unit.experts}
    return sorted(chosen | set(job.recipe.experts.widths))


def _weight(job: Job, rule: TensorRule) -> Tensor:
    """A linear's source weight as float32 (in, out)."""
    return job.source.read(rule.source).to(torch.float32).T.contiguous()


def _encode_dense(job: Job, layer: int) -> None:
    """All dense EXL3 linears of a layer at the recipe's width, from the Hessians of the calibration pass."""
    receipt = job.work.receipt(capture_unit(layer))
    if receipt is None:
        raise ResumeError(f"the calibration pass of layer {layer} is missing or damaged: run `keys35 measure` again")
    prefix = f"model.layers.{layer}."
    stored = load_recorded(job, capture_unit(layer), hessian_file(job, layer))
    hessians = {prefix + key.removeprefix("hessian."): hessian for key, hessian in stored.items()}
    bits = job.recipe.dense.bits
    carrier = receipt["data"]["carrier"]
    jobs = [
        LinearJob(rule.module, _weight(job, rule), prefix + carrier[rule.module.removeprefix(prefix)])
        for rule in job.rules.values()
        if rule.layer == layer and rule.role is Role.DENSE
    ]
    encoded = encode_group(jobs, hessians, [bits], job.encode_options, job.recipe.seed)
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for item in jobs:
        result = encoded[item.name, bits]
        tensors |= result.tensors(item.name)
        errors[item.name] = result.proxy_error
    fallback = [item.name for item in jobs if encoded[item.name, bits].fallback]
    path = dense_file(job, layer)
    digest = save_tensors(path, tensors)
    job.work.commit(dense_unit(layer), {path: digest}, {"bits": bits, "proxy_error": errors, "fallback": fallback})
    job.work.log("dense", layer=layer)
