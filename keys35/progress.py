"""Long work shows itself: a heartbeat on disk for `status`, a log line per event, a hook for the terminal."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from keys35.files.atomic import write_json
from keys35.files.ledger import Workdir
from keys35.memory import release

T = TypeVar("T")
HEARTBEAT = "progress.json"


@dataclass(frozen=True)
class Tick:
    """Where a stage stands. `kept` of `done` were found finished from an earlier run; times are Unix seconds."""

    stage: str
    done: int
    total: int
    kept: int
    note: str
    started: float
    updated: float
    pid: int

    @property
    def rate(self) -> float:
        """Units per second of this run, without those kept from an earlier one."""
        elapsed = self.updated - self.started
        return (self.done - self.kept) / elapsed if elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None while the rate is unknown."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None


class Progress:
    """Walks a stage's units and reports each one; `show` is the terminal's hook."""

    def __init__(self, work: Workdir | None = None, show: Callable[[Tick], None] | None = None):
        self._work = work
        self._show = show

    def walk(self, stage: str, units: Iterable[T], note: Callable[[T], str] = str) -> Iterator["Step[T]"]:
        """Yield every unit wrapped in a Step; the caller marks a step `kept` when nothing had to be done.

        Freed memory goes back to the system after each unit.
        """
        items = list(units)
        if not items:
            return
        started, kept = time.time(), 0
        self._report(Tick(stage, 0, len(items), 0, "", started, time.time(), os.getpid()))
        for done, item in enumerate(items, 1):
            step = Step(item)
            yield step
            release()
            kept += step.kept
            self._report(Tick(stage, done, len(items), kept, note(item), started, time.time(), os.getpid()))

    def _report(self, tick: Tick) -> None:
        if self._show:
            self._show(tick)
        if self._work:
            write_json(self._work.path(HEARTBEAT), asdict(tick))


@dataclass
class Step(Generic[T]):
    """One unit on its way; `kept` says it was found finished."""

    unit: T
    kept: bool = False
