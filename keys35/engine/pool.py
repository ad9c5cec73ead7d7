"""A pool: hands tasks to a crew in order, gives a dead worker's task to another one, keeps count for `status`."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keys35 import errors
from keys35.engine.task import Crew, Died, Done, Event, Failed, Ready, Task, Warned, WorkerState
from keys35.errors import Keys35Error, WorkerError

log = logging.getLogger(__name__)

DEATHS_PER_TASK = 6
STARTS_IN_VAIN = 20
HEARTBEAT_S = 5.0
STARTING = "starting"


@dataclass
class _Slot:
    """What the pool knows of one worker. `idle` and `task` are both unset while it starts."""

    where: str = STARTING
    idle: bool = False
    task: Task | None = None
    since: float = 0.0
    done: int = 0
    seconds: float = 0.0
    deaths: int = 0


class Pool:
    """Runs tasks on a crew; `submit` never blocks, `finished` yields units as they end.

    A worker that dies is replaced and its task goes to the front of the queue. Raises WorkerError when one task has
    cost DEATHS_PER_TASK workers, and whatever keys35 error a task raised.
    """

    def __init__(self, crew: Crew, begun: Callable[[Task, str], None] = lambda task, where: None) -> None:
        self._crew = crew
        self._begun = begun
        self._queue: deque[Task] = deque()
        self._slots = [_Slot() for _ in range(crew.size)]
        self._deaths: Counter[str] = Counter()
        self._vain = 0
        self._started = False

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._crew.size

    @property
    def outstanding(self) -> int:
        """Tasks that were submitted and are not finished."""
        return len(self._queue) + sum(slot.task is not None for slot in self._slots)

    def submit(self, task: Task) -> None:
        """Queue a task; workers start with the first one."""
        self._queue.append(task)
        if not self._started:
            self._started = True
            for slot in range(self._crew.size):
                self._crew.start(slot)
        self._hand_out()

    def finished(self, timeout: float = HEARTBEAT_S) -> list[str]:
        """Units that ended since the last call; waits up to `timeout` seconds for the first."""
        ended = []
        for event in self._crew.listen(timeout) if self._started else ():
            unit = self._take(event)
            ended += [unit] if unit else []
        self._hand_out()
        return ended

    def workers(self) -> tuple[WorkerState, ...]:
        """Every worker as it is now."""
        return tuple(
            WorkerState(s.where, s.task.unit if s.task else None, s.since, s.done, s.seconds, s.deaths)
            for s in self._slots
        )

    def stop(self) -> None:
        """End all workers."""
        self._crew.stop()

    def _hand_out(self) -> None:
        for number, slot in enumerate(self._slots):
            if slot.idle and self._queue:
                slot.task, slot.idle, slot.since = self._queue.popleft(), False, time.time()
                self._begun(slot.task, slot.where)
                self._crew.give(number, slot.task)

    def _take(self, event: Event) -> str | None:
        """Enter an event; the unit that ended with it, if one did."""
        slot = self._slots[event.slot]
        task = slot.task
        match event:
            case Ready(where=where):
                slot.where, slot.idle, self._vain = where, True, 0
            case Done(seconds=seconds):
                slot.task, slot.idle = None, True
                slot.done, slot.seconds = slot.done + 1, slot.seconds + seconds
                return task.unit
            case Failed(error=error, message=message):
                raise _as_raised(error, message, task.unit if task else "its start", slot.where)
            case Died(reason=reason):
                self._replace(event.slot, reason)
            case Warned(message=message):  # here it is said in whatever way this process speaks
                log.warning("worker %s: %s", slot.where, message)
        return None

    def _replace(self, number: int, reason: str) -> None:
        """Start another worker in a dead one's place and put its task first."""
        slot = self._slots[number]
        task, slot.task, slot.idle = slot.task, None, False
        log.warning("worker %s: %s, %s", slot.where, reason, f"{task.unit} is done again" if task else "it had no task")
        slot.where, slot.deaths = STARTING, slot.deaths + 1
        if task:
            self._queue.appendleft(task)
            self._deaths[task.unit] += 1
            if self._deaths[task.unit] == DEATHS_PER_TASK:
                raise WorkerError(f"{task.unit} has cost {DEATHS_PER_TASK} workers, the last one {reason}: most likely "
                                  "there is too little memory; lower experts.group or the number of workers")
        else:
            self._vain += 1
            if self._vain == STARTS_IN_VAIN:
                raise WorkerError(f"{STARTS_IN_VAIN} workers in a row died before they could work, the last one "
                                  f"{reason}: see what they wrote on stderr, or use --workers 1")
        self._crew.start(number)


def _as_raised(error: str, message: str, unit: str, where: str) -> Keys35Error:
    """The worker's refusal as if it had been raised here; anything else with the worker's traceback."""
    kind = getattr(errors, error, None)
    if isinstance(kind, type) and issubclass(kind, Keys35Error):
        return kind(message)
    return WorkerError(f"worker {where} failed at {unit}, which is a fault of keys35:\n{message}")


@contextmanager
def open_pool(crew: Crew, begun: Callable[[Task, str], None]) -> Iterator[Pool]:
    """A pool whose workers end with the block, however it ends."""
    pool = Pool(crew, begun)
    try:
        yield pool
    finally:
        pool.stop()
