"""Long work shows itself: a heartbeat on disk for `status`, a log line per event, a hook for the terminal."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Self, TypeVar

from keys35.files.atomic import write_json
from keys35.files.ledger import Workdir
from keys35.memory import release

T = TypeVar("T")
HEARTBEAT = "progress.json"


@dataclass(frozen=True)
class Tick:
    """Where a stage stands. `kept` of `done` were found finished from an earlier run; times are Unix seconds.

    workers: what each of them does, as JSON values; empty where the stage has none. host: whose process `pid` is, empty
    in the heartbeats of older versions.
    """

    stage: str
    done: int
    total: int
    kept: int
    note: str
    started: float
    updated: float
    pid: int
    workers: list[dict[str, Any]] = field(default_factory=list)
    host: str = ""

    @classmethod
    def known_of(cls, value: Mapping[str, Any]) -> Self:
        """From a heartbeat, leaving out what only a newer version knows; raises TypeError if something is missing."""
        known = {part.name for part in fields(cls)}
        return cls(**{key: part for key, part in value.items() if key in known})

    @property
    def rate(self) -> float:
        """Units per second of this run, without those kept from an earlier one."""
        elapsed = self.updated - self.started
        return (self.done - self.kept) / elapsed if elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None while the rate is unknown and anything is left."""
        if self.done == self.total:
            return 0.0
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
        meter = self.meter(stage, len(items))
        for item in items:
            step = Step(item)
            yield step
            release()
            meter.count(note(item), step.kept)

    def meter(self, stage: str, total: int) -> "Meter":
        """Count a stage's units one by one, in whatever order they end."""
        return Meter(self._report, stage, total)

    def _report(self, tick: Tick) -> None:
        if self._show:
            self._show(tick)
        if self._work:
            write_json(self._work.path(HEARTBEAT), asdict(tick))


class Meter:
    """Reports a stage from its first unit to its last."""

    def __init__(self, report: Callable[[Tick], None], stage: str, total: int) -> None:
        self._report, self._stage, self._total = report, stage, total
        self._started, self._done, self._kept, self._note = time.time(), 0, 0, ""
        self.beat()

    def count(self, note: str, kept: bool = False, workers: Sequence[dict[str, Any]] = ()) -> None:
        """One more unit is finished, or was found finished (`kept`)."""
        self._done, self._kept, self._note = self._done + 1, self._kept + kept, note
        self.beat(workers)

    def beat(self, workers: Sequence[dict[str, Any]] = ()) -> None:
        """A sign of life between two units."""
        times = self._started, time.time()
        self._report(Tick(self._stage, self._done, self._total, self._kept, self._note, *times, os.getpid(),
                          list(workers), os.uname().nodename))


@dataclass
class Step(Generic[T]):
    """One unit on its way; `kept` says it was found finished."""

    unit: T
    kept: bool = False
