"""Units of work and who does them: the tasks a stage hands out, and the worker that does one by its name."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from keys35.engine.here import Here
from keys35.engine.local import LocalCrew
from keys35.engine.pool import Pool, open_pool
from keys35.engine.serve import where
from keys35.engine.task import Crew, Task
from keys35.exl3.viterbi import prepare
from keys35.files.atomic import write_as
from keys35.files.ledger import BEGUN
from keys35.stages.capture import calibration_windows, layer_rows
from keys35.stages.dense import encode_dense
from keys35.stages.expert_encoding import LayerRows, Rows
from keys35.stages.experts import Shelf, encode_chosen, encode_experts, encode_final
from keys35.stages.job import Job, attach_job
from keys35.stages.prefix_rows import prefix_rows
from keys35.stages.sensitivity import propagate_part
from keys35.stages.units import FINAL, MEASURED, ExpertUnit, dense_unit, expert_units, not_held, sensitivity_unit

FACTORY = f"{__name__}:open_worker"


@dataclass(frozen=True)
class Workers:
    """How many workers, and where. count 0: one per GPU, or this process alone where there is at most one."""

    count: int = 0
    engine: Literal["local", "ray"] = "local"
    address: str = "auto"


Chosen = Mapping[float, Sequence[int]]
"""A group's experts by the width chosen for them."""


def experts_task(unit: ExpertUnit, widths: Sequence[int], keep: Sequence[int], then: Chosen | None = None) -> Task:
    """Encode a group of experts at some widths and keep some of the encodings; then those chosen that are not kept."""
    return Task(unit.name, _place(unit) | {"widths": list(widths), "keep": list(keep), "then": _pairs(then or {})})


def chosen_task(unit: ExpertUnit, chosen: Chosen) -> Task:
    """Encode some of a group's experts again, at the width chosen for each."""
    return Task(unit.name, _place(unit) | {"chosen": _pairs(chosen)})


def final_task(unit: ExpertUnit, chosen: Chosen) -> Task:
    """Encode a group of experts behind the quantized prefix, at the width chosen for each."""
    return Task(unit.name, _place(unit) | {"final": _pairs(chosen)})


def _pairs(chosen: Chosen) -> list[list[object]]:
    return [[width, list(experts)] for width, experts in chosen.items()]


def _place(unit: ExpertUnit) -> dict[str, int]:
    return {"layer": unit.layer, "start": unit.experts.start}


def dense_task(layer: int) -> Task:
    """Encode a layer's dense linears."""
    return Task(dense_unit(layer), {"layer": layer})


def sensitivity_task(part: int) -> Task:
    """Run a few windows through every perturbed copy of the model."""
    return Task(sensitivity_unit(part), {"part": part})


class UnitWorker:
    """Does the tasks above, reading what they need from the source and the work directory.

    One with a shelf is alone: it finds a layer's rows there, and knows what comes next, which is read while the GPU
    works.
    """

    def __init__(self, job: Job, shelf: Shelf | None = None) -> None:
        self._job, self._alone, self._shelf = job, shelf is not None, shelf or Shelf(job)
        self._store, self._windows = job.store, calibration_windows(job)
        self._coming = ThreadPoolExecutor(1, "prefetch")
        for widths in (job.recipe.experts.widths, [job.recipe.dense.bits]):
            prepare(job.encode_options.backend, frozenset(widths))

    def __call__(self, task: Task) -> None:
        match task.arguments:
            case {"layer": layer, "start": start, "widths": widths, "keep": keep, "then": chosen}:
                unit = _unit(self._job, layer, start)
                self._encode(unit, widths, keep)
                found = self._job.work.require(unit.name)["data"]
                if missing := not_held(found, dict(chosen)):  # only a sample was encoded
                    self._choose(unit, missing)
            case {"layer": layer, "start": start, "chosen": chosen}:
                self._choose(_unit(self._job, layer, start), dict(chosen))
            case {"layer": layer, "start": start, "final": chosen}:
                self._finish(_unit(self._job, layer, start, FINAL), dict(chosen))
            case {"layer": layer}:
                encode_dense(self._job, layer)
            case {"part": part}:
                self._shelf.rows.clear()
                propagate_part(self._job, self._store, self._windows["selection"], part)

    def _encode(self, unit: ExpertUnit, widths: Sequence[int], keep: Sequence[int]) -> None:
        following = _following(self._job, unit) if self._alone else None
        self._read_ahead(lambda: upcoming(self._job, unit))
        encode_experts(self._job, unit, widths, keep, self._rows(unit.layer), self._shelf.reader, following)
        if self._alone and following is None:
            self._shelf.rows.clear()  # the next layer needs the room

    def _choose(self, unit: ExpertUnit, chosen: Chosen) -> None:
        encode_chosen(self._job, unit, chosen, self._rows(unit.layer), self._shelf.reader)

    def _finish(self, unit: ExpertUnit, chosen: Chosen) -> None:
        # the source's stream passes the layer once all of it is encoded
        self._read_ahead(lambda: _share_behind(self._job, unit, unit.layer))
        rows = self._held(unit.layer, lambda: prefix_rows(self._job, unit.layer))
        encode_final(self._job, unit, chosen, rows, self._shelf.reader)

    def _rows(self, layer: int) -> LayerRows:
        return self._held(layer, lambda: layer_rows(self._job, layer, self._windows))

    def _held(self, layer: int, read: Callable[[], Rows]) -> Rows:
        """A layer's rows; of no two layers at once."""
        if layer not in self._shelf.rows:
            self._shelf.rows.clear()
            self._shelf.rows[layer] = read()
        return self._shelf.rows[layer]

    def _read_ahead(self, names: Callable[[], list[str]]) -> None:
        if self._alone and self._job.reads_ahead:
            self._coming.submit(self._job.source.prefetch, names())


def _following(job: Job, unit: ExpertUnit) -> ExpertUnit | None:
    """The layer's next unit that is not finished."""
    later = (other for other in expert_units(job, unit.layer) if other.experts.start > unit.experts.start)
    return next((other for other in later if job.work.receipt(other.name) is None), None)


def upcoming(job: Job, unit: ExpertUnit) -> list[str]:
    """A unit's share of the tensors that are read after its layer: those of the next one.

    Behind the last layer the layers' weights are measured, from the first one on.
    """
    return _share_behind(job, unit, unit.layer + 1 if unit.layer + 1 in job.config.layers else 0)


def _share_behind(job: Job, unit: ExpertUnit, layer: int) -> list[str]:
    """A unit's share of the tensors of a layer that is read next.

    Where that is its own, each share is of tensors whose encoding lies behind: reading one for that drops it from the
    system's cache.
    """
    units = job.expert_groups()
    place = units.index(unit.experts) - (layer == unit.layer)
    tensors = [rule.source for rule in job.rules.values() if rule.layer == layer]
    return tensors[max(0, len(tensors) * place // len(units)) : len(tensors) * (place + 1) // len(units)]


def _unit(job: Job, layer: int, start: int, folder: str = MEASURED) -> ExpertUnit:
    return ExpertUnit(layer, next(group for group in job.expert_groups() if group.start == start), folder)


def open_worker(root: str) -> Callable[[Task], None]:
    """A worker of the job in a work directory; the factory that crews name."""
    write_as(where().replace(":", "-"))
    return UnitWorker(attach_job(Path(root)))


@contextmanager
def open_workers(job: Job, workers: Workers, shelf: Shelf) -> Iterator[Pool | Here]:
    """Workers for one stage, which end with the block; every task that begins is in the log.

    shelf: where a worker in this process finds rows.
    """
    calibration_windows(job)  # made once, before workers look for them

    def begun(task: Task, worker: str) -> None:
        job.work.log(BEGUN, unit=task.unit, worker=worker)

    gpus = torch.cuda.device_count()
    if workers.engine == "local" and (workers.count or gpus) <= 1:
        yield Here(UnitWorker(job, shelf), begun)
        return
    with open_pool(_crew(job, workers, gpus), begun) as pool:
        yield pool


def _crew(job: Job, workers: Workers, gpus: int) -> Crew:
    root = str(job.work.root)
    if workers.engine == "ray":
        from keys35.engine.cluster import RayCrew

        return RayCrew(FACTORY, root, workers.address, workers.count)
    count = workers.count or gpus
    return LocalCrew(FACTORY, root, [_environment(slot, count, gpus) for slot in range(count)])


def _environment(slot: int, count: int, gpus: int) -> dict[str, str]:
    """A worker's GPU, or its share of the cores."""
    share = max(1, len(os.sched_getaffinity(0)) // count)
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "8,2": 8, and 2 inside of each
    threads = str(min(share, int(asked)) if asked.isdecimal() else share)
    shared = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    if not gpus:
        return shared
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = visible[slot % gpus] if visible != [""] else str(slot % gpus)
    return shared | {"CUDA_VISIBLE_DEVICES": device}
