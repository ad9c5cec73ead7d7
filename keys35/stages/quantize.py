"""Quantize: everything at its final width. Experts that `measure` encoded are selected, the rest is encoded now."""

from collections.abc import Iterator
from functools import partial

from keys35.calibration.windows import Windows
from keys35.engine.task import Task
from keys35.glm.names import Role
from keys35.glm.weights import WeightStore
from keys35.progress import Progress
from keys35.stages.allocate import load_allocation
from keys35.stages.capture import calibration_windows, capture, forget_states, has_states, require_rows, rows_file
from keys35.stages.experts import Shelf
from keys35.stages.job import Job
from keys35.stages.needs import encoded_bytes, rows_bytes, states_bytes
from keys35.stages.quantize_in_order import quantize_in_order
from keys35.stages.schedule import Step, carry_out
from keys35.stages.units import ExpertUnit, by_width, dense_unit, expert_units, not_held, unit_rules
from keys35.stages.workers import Workers, chosen_task, dense_task, experts_task, open_workers


def quantize(job: Job, progress: Progress, workers: Workers | None = None) -> None:
    """Encode fixed-width linears and MTP experts, and any expert whose allocated width has no encoding yet."""
    if job.recipe.encoder.prefix == "quantized":
        quantize_in_order(job, progress, workers or Workers())
        return
    passing = 2 * (states_bytes(job.config, job.recipe) + rows_bytes(job.config, job.recipe))
    with open_workers(job, workers or Workers(), Shelf(job)) as pool:
        carry_out(job, "quantize", list(_steps(job)), pool, progress,
                  lambda layer: rows_file(job, layer).unlink(missing_ok=True), passing)
    for layer in range(job.config.num_hidden_layers - 1):
        forget_states(job, layer)  # what a replay leaves behind


def _steps(job: Job) -> Iterator[Step]:
    """Layer by layer its dense linears and its experts' units, before those their rows if any is to be encoded."""
    allocation, windows, store = load_allocation(job), calibration_windows(job), job.store
    tasks = {unit: _task(job, unit, allocation) for layer in job.config.layers if job.config.is_moe(layer)
             for unit in expert_units(job, layer)}
    lacking = {unit.layer for unit, task in tasks.items() if task and not rows_file(job, unit.layer).exists()}
    replayed = _replayed(job, lacking)
    dense = {rule.layer for rule in job.rules.values() if rule.role is Role.DENSE}
    for layer in job.config.layers:
        if layer in replayed:
            yield Step(f"layer {layer}: calibration pass again", layer, False,
                       partial(_capture_again, job, store, layer, windows))
        elif layer in lacking:  # an MTP layer
            yield Step(f"layer {layer}: calibration pass again", layer, False,
                       partial(require_rows, job, store, layer, windows))
        if layer in dense:
            rules = [rule for rule in job.rules.values() if rule.layer == layer]
            yield Step(f"layer {layer}: dense linears", layer, job.work.receipt(dense_unit(layer)) is not None,
                       dense_task(layer), encoded_bytes(rules, Role.DENSE, [job.recipe.dense.bits]), "dense")
        for unit in expert_units(job, layer) if job.config.is_moe(layer) else ():
            task = tasks[unit]
            yield Step(f"layer {layer}: experts {unit.experts.start}+", layer, task is None, task or Task(unit.name),
                       _bytes(job, unit), "experts")


def _capture_again(job: Job, store: WeightStore, layer: int, windows: dict[str, Windows]) -> None:
    capture(job, store, layer, windows, replay=True)()


def _replayed(job: Job, lacking: set[int]) -> range:
    """Trunk layers to be captured again for the rows of `lacking`: from the last states still on disk to the last."""
    trunk = sorted(lacking - set(job.config.mtp_layers))
    if not trunk:
        return range(0)
    kept = [layer for layer in range(trunk[0]) if has_states(job, layer)]
    return range(kept[-1] + 1 if kept else 0, trunk[-1] + 1)


def _task(job: Job, unit: ExpertUnit, allocation: dict[int, list[int]]) -> Task | None:
    """What a unit still needs: its measured widths, or those chosen for its experts again; None if it has it all."""
    receipt = job.work.receipt(unit.name)
    if job.config.is_mtp(unit.layer):
        return None if receipt else experts_task(unit, [job.recipe.mtp.bits], [job.recipe.mtp.bits])
    chosen = by_width(unit, allocation[unit.layer])
    if receipt is None:
        widths = sorted({*chosen, *job.recipe.experts.widths})
        return experts_task(unit, widths, widths if job.keep == "all" else sorted(chosen), chosen)
    missing = not_held(receipt["data"], chosen)
    return chosen_task(unit, missing) if missing else None


def _bytes(job: Job, unit: ExpertUnit) -> int:
    """At most the candidates' bytes, or the widest's where only the chosen ones are missing; exactly an MTP unit's."""
    if job.config.is_mtp(unit.layer):
        return encoded_bytes(unit_rules(job, unit), Role.MTP_EXPERT, [job.recipe.mtp.bits])
    widths = job.recipe.experts.widths
    return encoded_bytes(unit_rules(job, unit), Role.EXPERT, widths[-1:] if job.work.receipt(unit.name) else widths)
