"""Measure: stream the model over calibration windows, encode every expert at every width, record what it costs."""

from collections.abc import Iterator, Sequence
from functools import partial

from keys35.engine.here import Here
from keys35.glm.names import Role
from keys35.progress import Progress
from keys35.stages.capture import calibration_windows, capture, rows_file
from keys35.stages.experts import Shelf
from keys35.stages.job import Job
from keys35.stages.needs import encoded_bytes, hessian_bytes, rows_bytes, simulated_bytes, states_bytes
from keys35.stages.schedule import Step, carry_out
from keys35.stages.sensitivity import conclude_sensitivity, sensitivity_parts
from keys35.stages.units import (
    SENSITIVITY,
    ExpertUnit,
    capture_unit,
    expert_units,
    middle_width,
    sampled,
    sensitivity_unit,
    unit_rules,
)
from keys35.stages.workers import Workers, experts_task, open_workers, sensitivity_task


def measure(job: Job, progress: Progress, workers: Workers | None = None) -> None:
    """Run or resume the whole measurement; every finished unit is in the ledger."""

    def layer_finished(layer: int) -> None:
        if layer in job.config.moe_layers:
            rows_file(job, layer).unlink(missing_ok=True)  # every candidate exists, nothing reads them again

    passing = 2 * (states_bytes(job.config, job.recipe) + rows_bytes(job.config, job.recipe))
    shelf = Shelf(job)
    with open_workers(job, workers or Workers(), shelf) as pool:
        steps = list(_steps(job, shelf if isinstance(pool, Here) else None))
        carry_out(job, "measure", steps, pool, progress, layer_finished, passing)


def _steps(job: Job, shelf: Shelf | None) -> Iterator[Step]:
    """Layer by layer the calibration pass and the experts' units; behind them what the layers' errors are worth."""
    windows, store, done = calibration_windows(job), job.store, lambda unit: job.work.receipt(unit) is not None
    widths, handed = job.recipe.experts.widths, {}
    keep = widths if job.keep == "all" else [middle_width(job.recipe)[1]]
    for layer in job.config.layers:
        # MTP experts have one fixed width: they are captured here and encoded by `quantize`.
        units = expert_units(job, layer) if layer in job.config.moe_layers else []
        encoded = [done(unit.name) for unit in units]
        captured = done(capture_unit(layer)) and (all(encoded) or rows_file(job, layer).exists())
        yield Step(f"layer {layer}: calibration pass", layer, captured,
                   partial(capture, job, store, layer, windows, shelf=shelf, handed=handed),
                   hessian_bytes((rule for rule in job.rules.values() if rule.layer == layer), job.recipe))
        for unit, kept in zip(units, encoded, strict=True):
            yield Step(f"layer {layer}: experts {unit.experts.start}+", layer, kept, experts_task(unit, widths, keep),
                       _bytes(job, unit, keep), "experts")
    behind = max(job.config.layers) + 2  # far enough that every layer's experts are finished
    for part in sensitivity_parts(windows["selection"], job.recipe):
        yield Step(f"layer weights: part {part}", behind, done(sensitivity_unit(part)), sensitivity_task(part))
    yield Step("layer weights", behind + 2, done(SENSITIVITY), partial(conclude_sensitivity, job, windows["selection"]))


def _bytes(job: Job, unit: ExpertUnit, keep: Sequence[float]) -> int:
    encodings = encoded_bytes(unit_rules(job, unit, sampled(job, unit)), Role.EXPERT, keep)
    return encodings + simulated_bytes(job.config, len(unit.experts), job.recipe)
