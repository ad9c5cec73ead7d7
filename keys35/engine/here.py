"""No workers: tasks are done in this process, at once, behind the same interface as a pool."""

import time
from collections.abc import Callable

from keys35.engine.serve import Work, where
from keys35.engine.task import Task, WorkerState


class Here:
    """Does a task when it is submitted; whatever it raises is raised by `submit`."""

    size, outstanding = 1, 0

    def __init__(self, work: Work, begun: Callable[[Task, str], None]) -> None:
        self._work, self._begun = work, begun
        self._ended: list[str] = []
        self._unit: str | None = None
        self._since, self._seconds, self._done = time.time(), 0.0, 0

    def begin(self, unit: str | None) -> None:
        """What this process does from now on, for `workers`; None: nothing."""
        self._unit, self._since = unit, time.time()

    def submit(self, task: Task) -> None:
        """Do a task now."""
        self._begun(task, where())
        started = time.monotonic()
        self._work(task)
        self._seconds += time.monotonic() - started
        self._done += 1
        self._ended.append(task.unit)

    def finished(self, timeout: float = 0.0) -> list[str]:
        """Units that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def workers(self) -> tuple[WorkerState, ...]:
        """This process."""
        return (WorkerState(where(), self._unit, self._since, self._done, self._seconds, 0),)
