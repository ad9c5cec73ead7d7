"""Quantize behind the quantized prefix: layer after layer, everything at its final width, whatever was measured."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from keys35.engine.here import Here
from keys35.glm.names import Role
from keys35.progress import Progress
from keys35.stages.allocate import load_allocation
from keys35.stages.capture import calibration_windows, rows_file
from keys35.stages.dropped import dropped_anywhere, left
from keys35.stages.experts import Shelf
from keys35.stages.job import Job
from keys35.stages.needs import encoded_bytes, prefix_bytes
from keys35.stages.prefix import encode_behind_prefix
from keys35.stages.prefix_rows import rows_again, rows_files
from keys35.stages.schedule import AHEAD, Conclude, Step, carry_out
from keys35.stages.shared import finish_layer
from keys35.stages.streams import Handed, forget_attended
from keys35.stages.units import by_width, dense_unit, encoded_last, final_units, shared_unit, unit_rules
from keys35.stages.workers import Workers, final_task, open_workers

APART = AHEAD + 1  # places from layer to layer: one begins when the layer before is finished


def quantize_in_order(
    job: Job, progress: Progress, workers: Workers, allocation: dict[int, list[float]] | None = None
) -> None:
    """Encode every linear on what the linears encoded before it give; a layer's experts are shared out.

    allocation: layer -> width of each expert, in a work directory of its own; without it the one that was allocated.
    """
    dropped: list[Future[None]] = []
    shelf = Shelf(job)
    with ThreadPoolExecutor(1, "dropping") as beside, open_workers(job, workers, shelf) as pool:

        def finished(place: int) -> None:  # tens of gigabytes, for which a layer would wait for seconds
            dropped.extend(beside.submit(path.unlink, missing_ok=True)
                           for path in rows_files(job, place // APART).values())

        mine = shelf if isinstance(pool, Here) else None
        steps = list(_steps(job, mine, allocation or load_allocation(job)))
        carry_out(job, "quantize", steps, pool, progress, finished, sum(prefix_bytes(job.config, job.recipe)))
    for done in dropped:
        done.result()
    for layer in job.config.layers:
        forget_attended(job, layer)
    for layer in job.config.mtp_layers:
        rows_file(job, layer).unlink(missing_ok=True)  # which the measurement left


def _steps(job: Job, shelf: Shelf | None, allocation: dict[int, list[float]]) -> Iterator[Step]:
    """Layer by layer its dense linears, its experts' units, and the states that it gives the next one."""
    windows = left(calibration_windows(job), dropped_anywhere(job))["fit"]
    widths = allocation | {layer: [job.recipe.mtp.bits] * job.experts for layer in job.config.mtp_layers}

    def alone(act: Callable[..., Conclude | None], layer: int) -> Callable[[], Conclude | None]:
        def do() -> Conclude | None:
            if shelf is not None:
                shelf.rows.clear()
            return act(job, layer, windows, allocation)
        return do

    handed = Handed()
    for layer in job.config.layers:
        place, units = APART * layer, final_units(job, layer) if job.config.is_moe(layer) else []
        encoded = [job.work.receipt(unit.name) is not None for unit in units]
        dense = job.work.receipt(dense_unit(layer)) is not None
        prepare = partial(rows_again if dense else encode_behind_prefix, handed=handed, shelf=shelf)
        prepared = dense and (all(encoded) or all(path.exists() for path in rows_files(job, layer).values()))
        rules = [rule for rule in job.rules.values() if rule.layer == layer]
        yield Step(f"layer {layer}: dense linears", place, prepared, alone(prepare, layer),
                   encoded_bytes(rules, Role.DENSE, [job.recipe.dense.bits]), "dense")
        for unit, kept in zip(units, encoded, strict=True):
            yield Step(f"layer {layer}: experts {unit.experts.start}+", place, kept,
                       final_task(unit, by_width(unit, widths[layer])),
                       sum(encoded_bytes(unit_rules(job, unit), role, [max(widths[layer])])
                           for role in (Role.EXPERT, Role.MTP_EXPERT)), "experts")
        if not job.config.is_mtp(layer):
            last = encoded_last(job, layer)
            yield Step(f"layer {layer}: states onward", place + APART, not _awaited(job, layer),
                       alone(partial(finish_layer, handed=handed), layer),
                       encoded_bytes([last] if last else [], Role.DENSE, [job.recipe.dense.bits]))


def _awaited(job: Job, layer: int) -> bool:
    """Whether `finish_layer` has still to encode something of a layer, or to hand its states to the next one."""
    due = [shared_unit(layer)] * bool(encoded_last(job, layer))
    due += [dense_unit(layer + 1)] * (layer + 1 in job.config.layers)
    return any(job.work.receipt(unit) is None for unit in due)
