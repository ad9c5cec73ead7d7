"""Tasks, and what a crew of workers says about them; plain values that travel as JSON."""

import json
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """One unit of work: the receipt it ends with, and JSON arguments for whoever does it."""

    unit: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({"unit": self.unit, "arguments": self.arguments})

    @classmethod
    def read(cls, line: str) -> "Task":
        """The inverse of `line`."""
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Ready:
    """A worker waits for its first task."""

    slot: int
    where: str
    """Host and process, for people."""


@dataclass(frozen=True)
class Done:
    """A worker finished its task; its receipt is on disk."""

    slot: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A worker's task raised: the name of the exception and its message. Trying again would not help."""

    slot: int
    error: str
    message: str


@dataclass(frozen=True)
class Died:
    """A worker is gone, with whatever it was doing."""

    slot: int
    reason: str


@dataclass(frozen=True)
class Warned:
    """Something in a worker warned of something; it goes on."""

    slot: int
    message: str


Event = Ready | Done | Failed | Died | Warned


def answer(slot: int, message: dict[str, Any]) -> Event:
    """A worker's answer as an event: {"kind": "ready" | "done" | "failed" | "warned", ...}."""
    fields = dict(message)
    return {"ready": Ready, "done": Done, "failed": Failed, "warned": Warned}[fields.pop("kind")](slot, **fields)


class Crew(Protocol):
    """Workers in numbered slots, reached one way or another; each does one task at a time."""

    size: int

    def start(self, slot: int) -> None:
        """Start a worker in an empty slot; a Ready, Failed or Died of that slot follows."""

    def give(self, slot: int, task: Task) -> None:
        """Hand a task to a ready worker; a Done, Failed or Died of that slot follows."""

    def listen(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout` seconds for the first event."""

    def stop(self) -> None:
        """End all workers, whatever they are doing."""


@dataclass(frozen=True)
class WorkerState:
    """One worker for `status`: where it runs, its unit since when (Unix seconds), and what it has finished."""

    where: str
    unit: str | None
    since: float
    done: int
    seconds: float
    deaths: int
