"""A stage as steps in order: the driver's own, and tasks for the workers; kept ones are counted and left alone."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from keys35.engine.here import Here
from keys35.engine.pool import Pool
from keys35.engine.task import Task
from keys35.memory import release
from keys35.progress import Meter, Progress
from keys35.stages.job import Job

AHEAD = 1


@dataclass(frozen=True)
class Step:
    """One unit of a stage.

    place: where it stands in the stage's order, a layer's number or beyond the last. A step begins when everything
    more than AHEAD places before it is finished, so the driver's forward pass runs while the layer before is encoded,
    and at most two layers' rows lie on disk. kept: it was found finished.
    """

    note: str
    place: int
    kept: bool
    do: Callable[[], object] | Task
    """The driver's own work, or a task."""
    event: str | None = None
    """What the log calls a finished task."""


def carry_out(
    job: Job,
    stage: str,
    steps: Sequence[Step],
    pool: Pool | Here,
    progress: Progress,
    finished: Callable[[int], None] = lambda place: None,
) -> None:
    """Do a stage's steps; `finished(place)` is called when all steps of a place are done or were kept."""
    run = _Run(job, pool, progress.meter(stage, len(steps)), Counter(step.place for step in steps), finished)
    for step in steps:
        if step.kept:
            run.end(step, kept=True)
            continue
        run.wait_for(step.place)
        if isinstance(step.do, Task):
            run.hand_out(step, step.do)
        else:
            step.do()
            release()
            run.end(step)
    run.wait_for(None)


@dataclass
class _Run:
    job: Job
    pool: Pool | Here
    meter: Meter
    left: Counter[int]
    finished: Callable[[int], None]

    def __post_init__(self) -> None:
        self._pending: dict[str, Step] = {}

    def hand_out(self, step: Step, task: Task) -> None:
        self._pending[task.unit] = step
        self.pool.submit(task)
        self._collect(0)

    def wait_for(self, place: int | None) -> None:
        """Until what must be finished before a step of `place` is; None: until everything is."""
        while any(place is None or step.place < place - AHEAD for step in self._pending.values()):
            self._collect(None)

    def end(self, step: Step, kept: bool = False) -> None:
        self.meter.count(step.note, kept, self._workers())
        self.left[step.place] -= 1
        if not self.left[step.place]:
            self.finished(step.place)

    def _collect(self, timeout: float | None) -> None:
        ended = self.pool.finished() if timeout is None else self.pool.finished(timeout)
        for unit in ended:
            step = self._pending.pop(unit)
            if step.event:
                self.job.work.log(step.event, unit=unit)
            release()
            self.end(step)
        if not ended:
            self.meter.beat(self._workers())

    def _workers(self) -> list[dict[str, object]]:
        return [asdict(worker) for worker in self.pool.workers()]
