"""Quantize: everything at its final width. Experts that `measure` encoded are selected, the rest is encoded now."""

from collections.abc import Iterator
from functools import partial

from keys35.glm.names import Role
from keys35.progress import Progress
from keys35.stages.allocate import load_allocation
from keys35.stages.capture import calibration_windows, require_rows, rows_file
from keys35.stages.job import Job
from keys35.stages.schedule import Step, carry_out
from keys35.stages.units import ExpertUnit, dense_unit, expert_units
from keys35.stages.workers import Workers, dense_task, experts_task, open_workers


def quantize(job: Job, progress: Progress, workers: Workers | None = None) -> None:
    """Encode fixed-width linears and MTP experts, and any expert whose allocated width has no encoding yet."""
    with open_workers(job, workers or Workers()) as pool:
        carry_out(job, "quantize", list(_steps(job)), pool, progress,
                  lambda layer: rows_file(job, layer).unlink(missing_ok=True))


def _steps(job: Job) -> Iterator[Step]:
    """Layer by layer its dense linears and its experts' units, before those their rows if any is to be encoded."""
    allocation, windows, store = load_allocation(job), calibration_windows(job), job.store
    dense = {rule.layer for rule in job.rules.values() if rule.role is Role.DENSE}
    for layer in job.config.layers:
        if layer in dense:
            done = job.work.receipt(dense_unit(layer)) is not None
            yield Step(f"layer {layer}: dense linears", layer, done, dense_task(layer), "dense")
        units = expert_units(job, layer) if job.config.is_moe(layer) else []
        widths = {unit: _widths(job, unit, allocation) for unit in units}
        done = {unit: _holds(job, unit, widths[unit]) for unit in units}
        if not all(done.values()):
            yield Step(f"layer {layer}: calibration rows", layer, rows_file(job, layer).exists(),
                       partial(require_rows, job, store, layer, windows))
        for unit in units:
            yield Step(f"layer {layer}: experts {unit.experts.start}+", layer, done[unit],
                       experts_task(unit, widths[unit]), "experts")


def _holds(job: Job, unit: ExpertUnit, widths: list[int]) -> bool:
    receipt = job.work.receipt(unit.name)
    return receipt is not None and set(receipt["data"]["widths"]) >= set(widths)


def _widths(job: Job, unit: ExpertUnit, allocation: dict[int, list[int]]) -> list[int]:
    """What a unit must hold: its measured candidates (one of them is chosen), or the MTP experts' one width."""
    if job.config.is_mtp(unit.layer):
        return [job.recipe.mtp.bits]
    chosen = {allocation[unit.layer][expert] for expert in unit.experts}
    return sorted(chosen | set(job.recipe.experts.widths))
