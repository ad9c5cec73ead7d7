"""Units of work and who does them: the tasks a stage hands out, and the worker that does one by its name."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from keys35.engine.here import Here
from keys35.engine.local import LocalCrew
from keys35.engine.pool import Pool, open_pool
from keys35.engine.serve import where
from keys35.engine.task import Crew, Task
from keys35.files.atomic import write_as
from keys35.files.ledger import BEGUN
from keys35.stages.capture import calibration_windows, layer_rows
from keys35.stages.dense import encode_dense
from keys35.stages.experts import encode_chosen, encode_experts, first_tensors
from keys35.stages.job import Job, attach_job
from keys35.stages.sensitivity import propagate_part
from keys35.stages.units import ExpertUnit, dense_unit, expert_units, sensitivity_unit

FACTORY = f"{__name__}:open_worker"


@dataclass(frozen=True)
class Workers:
    """How many workers, and where. count 0: one per GPU, or this process alone where there is at most one."""

    count: int = 0
    engine: Literal["local", "ray"] = "local"
    address: str = "auto"


def experts_task(unit: ExpertUnit, widths: Sequence[int], keep: Sequence[int]) -> Task:
    """Encode a group of experts at some widths and keep some of the encodings."""
    return Task(unit.name, _place(unit) | {"widths": list(widths), "keep": list(keep)})


def chosen_task(unit: ExpertUnit, chosen: Mapping[int, Sequence[int]]) -> Task:
    """Encode some of a group's experts again, at the width chosen for each (width -> experts)."""
    return Task(unit.name, _place(unit) | {"chosen": [[width, list(experts)] for width, experts in chosen.items()]})


def _place(unit: ExpertUnit) -> dict[str, int]:
    return {"layer": unit.layer, "start": unit.experts.start}


def dense_task(layer: int) -> Task:
    """Encode a layer's dense linears."""
    return Task(dense_unit(layer), {"layer": layer})


def sensitivity_task(part: int) -> Task:
    """Run a few windows through every perturbed copy of the model."""
    return Task(sensitivity_unit(part), {"part": part})


def unit_worker(job: Job, alone: bool = False) -> Callable[[Task], None]:
    """What does the tasks above, reading what they need from the source and the work directory.

    A worker that is alone knows what comes next, and lets the system read it while the GPU works.
    """
    store = job.store
    coming = ThreadPoolExecutor(1, "prefetch")
    looks_ahead = alone and job.device.type == "cuda" and not job.recipe.encoder.low_memory
    windows = calibration_windows(job)
    rows = lru_cache(maxsize=1)(lambda layer: layer_rows(job, layer, windows))

    def work(task: Task) -> None:
        match task.arguments:
            case {"layer": layer, "start": start, "widths": widths, "keep": keep}:
                if looks_ahead:
                    coming.submit(job.source.prefetch, upcoming(job, _unit(job, layer, start)))
                encode_experts(job, _unit(job, layer, start), widths, keep, rows(layer))
            case {"layer": layer, "start": start, "chosen": chosen}:
                encode_chosen(job, _unit(job, layer, start), dict(chosen), rows(layer))
            case {"layer": layer}:
                encode_dense(job, layer)
            case {"part": part}:
                propagate_part(job, store, windows["selection"], part)

    return work


def upcoming(job: Job, unit: ExpertUnit) -> list[str]:
    """Tensors that are read after a unit: the first of the layer's next unit, and a share of the next layer's.

    Behind the last layer the layers' weights are measured, from the first one on.
    """
    units = expert_units(job, unit.layer)
    place = units.index(unit)
    layer = unit.layer + 1 if unit.layer + 1 in job.config.layers else 0
    after = [rule.source for rule in job.rules.values() if rule.layer == layer]
    share = after[len(after) * place // len(units) : len(after) * (place + 1) // len(units)]
    return [*(first_tensors(job, units[place + 1]) if place + 1 < len(units) else []), *share]


def _unit(job: Job, layer: int, start: int) -> ExpertUnit:
    return next(unit for unit in expert_units(job, layer) if unit.experts.start == start)


def open_worker(root: str) -> Callable[[Task], None]:
    """A worker of the job in a work directory; the factory that crews name."""
    write_as(where().replace(":", "-"))
    return unit_worker(attach_job(Path(root)))


@contextmanager
def open_workers(job: Job, workers: Workers) -> Iterator[Pool | Here]:
    """Workers for one stage, which end with the block; every task that begins is in the log."""
    calibration_windows(job)  # made once, before workers look for them

    def begun(task: Task, worker: str) -> None:
        job.work.log(BEGUN, unit=task.unit, worker=worker)

    gpus = torch.cuda.device_count()
    if workers.engine == "local" and (workers.count or gpus) <= 1:
        yield Here(unit_worker(job, alone=True), begun)
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
    threads = str(min(share, int(os.environ.get("OMP_NUM_THREADS") or share)))
    shared = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    if not gpus:
        return shared
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = visible[slot % gpus] if visible != [""] else str(slot % gpus)
    return shared | {"CUDA_VISIBLE_DEVICES": device}
