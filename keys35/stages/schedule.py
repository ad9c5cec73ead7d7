"""A stage as steps in order: the driver's own, and tasks for the workers; kept ones are counted and left alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from keys35.engine.here import Here
from keys35.engine.pool import Pool
from keys35.engine.serve import where
from keys35.engine.task import Task
from keys35.errors import ResumeError
from keys35.files.atomic import free_bytes, require_space
from keys35.files.ledger import BEGUN
from keys35.memory import release
from keys35.progress import Meter, Progress
from keys35.stages.job import Job

Conclude = Callable[[], None]
AHEAD = 1
QUEUED = 2  # tasks per worker


@dataclass(frozen=True)
class Step:
    """One unit of a stage.

    do: the driver's own work, or a task. The former may return what concludes it, if its files are still being written:
    that is called before the driver's next step and before whoever needs the files begins.

    place: where it stands in the stage's order, a layer's number or beyond the last. A step begins when everything
    more than AHEAD places before it is finished, so the driver's forward pass runs while the layer before is encoded,
    and at most two layers' rows lie on disk. kept: it was found finished. nbytes: what it leaves on disk.
    """

    note: str
    place: int
    kept: bool
    do: Callable[[], Conclude | None] | Task
    nbytes: int = 0
    event: str | None = None
    """What the log calls a finished task."""


def carry_out(
    job: Job,
    stage: str,
    steps: Sequence[Step],
    pool: Pool | Here,
    progress: Progress,
    finished: Callable[[int], None] = lambda place: None,
    passing: int = 0,
) -> None:
    """Do a stage's steps; `finished(place)` is called when all steps of a place are done or were kept.

    Raises PlanError unless what the steps leave on disk fits, with `passing` bytes that come and go beside it, and
    ResumeError when on the way the next step no longer does.
    """
    todo = [step.nbytes for step in steps if not step.kept]
    if todo:
        require_space(job.work.root, sum(todo) + passing)
    run = _Run(job, pool, progress.meter(stage, len(steps)), Counter(step.place for step in steps), finished)
    try:
        for step in steps:
            if step.kept:
                run.end(step, kept=True)
                continue
            run.wait_for(step.place)
            if isinstance(step.do, Task):
                run.hand_out(step, step.do)
            else:
                run.do(step, step.do)
        run.wait_for(None)
    finally:
        run.conclude()


def _watch(job: Job, step: Step) -> None:
    """Stop before a disk is full rather than in the middle of a unit; others may be filling it."""
    free = free_bytes(job.work.root)
    if free < step.nbytes:
        raise ResumeError(f"{job.work.root}: the disk is nearly full, {free} bytes are free and {step.note} needs "
                          f"{step.nbytes}: free space and run the same command again, finished work is kept")


@dataclass
class _Run:
    job: Job
    pool: Pool | Here
    meter: Meter
    left: Counter[int]
    finished: Callable[[int], None]

    def __post_init__(self) -> None:
        self._pending: dict[str, Step] = {}
        self._open: tuple[Step, Conclude] | None = None

    def do(self, step: Step, work: Callable[[], Conclude | None]) -> None:
        """A step of the driver's own; what it leaves open is concluded later."""
        self.conclude()
        _watch(self.job, step)
        self.job.work.log(BEGUN, unit=step.note, worker=where())
        with self._shown(step.note):
            conclude = work()
        release()
        if conclude is None:
            self.end(step)
        else:
            self._open = step, conclude

    def conclude(self) -> None:
        """Wait for the files of the driver's last step and count it."""
        if self._open is not None:
            (step, conclude), self._open = self._open, None
            conclude()
            self.end(step)

    def hand_out(self, step: Step, task: Task) -> None:
        if not isinstance(self.pool, Here):  # which has in memory what another process reads from disk
            self.conclude()
        while self.pool.outstanding >= QUEUED * self.pool.size:  # so that free space is asked for when it matters
            self._collect(None)
        _watch(self.job, step)
        self._pending[task.unit] = step
        with self._shown(task.unit):
            self.pool.submit(task)
        self.conclude()
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
        if not ended and timeout is None:
            self.meter.beat(self._workers())

    @contextmanager
    def _shown(self, unit: str) -> Iterator[None]:
        """A unit that this process is about to do is in the heartbeat before it begins: it may take minutes."""
        if isinstance(self.pool, Here):
            self.pool.begin(unit)
            self.meter.beat(self._workers())
        yield
        if isinstance(self.pool, Here):
            self.pool.begin(None)

    def _workers(self) -> list[dict[str, object]]:
        return [asdict(worker) for worker in self.pool.workers()]
