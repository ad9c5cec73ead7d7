"""Steps in order: a driver's step whose files are still being written is concluded in time, whatever happens."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from keys35.engine.here import Here
from keys35.engine.task import Task
from keys35.files.ledger import Workdir
from keys35.progress import HEARTBEAT, Progress
from keys35.stages.schedule import Step, carry_out


def carried(root: Path, fails: bool = False) -> list[str]:
    """What happens, in order, when two tasks follow a step that is concluded later, and a second such step them."""
    done: list[str] = []

    def own(name: str):
        return lambda: done.append(name) or (lambda: done.append(f"{name} saved"))

    def work(task: Task) -> None:
        done.append(task.unit)
        if fails:
            raise KeyboardInterrupt

    job = SimpleNamespace(work=Workdir.open(root, {}))
    steps = [Step("pass 0", 0, False, own("pass 0")), Step("a", 0, False, Task("a")), Step("b", 0, False, Task("b")),
             Step("pass 1", 1, False, own("pass 1")), Step("pass 2", 2, False, own("pass 2"))]
    try:
        carry_out(job, "stage", steps, Here(work, lambda *_: None), Progress(),
                  lambda place: done.append(f"end {place}"))
    except KeyboardInterrupt:
        assert fails
    return done


def test_files_are_there_before_the_next_step_and_at_most_one_task_in_this_process_runs_beside(tmp_path) -> None:
    rest = ["pass 1", "pass 1 saved", "end 1", "pass 2", "pass 2 saved", "end 2"]
    assert carried(tmp_path / "here") == ["pass 0", "a", "pass 0 saved", "b", "end 0", *rest]


def test_another_process_begins_when_the_files_are_there(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keys35.stages.schedule.Here", type("NotHere", (), {}))
    assert carried(tmp_path / "away")[:3] == ["pass 0", "pass 0 saved", "a"]


def test_a_task_that_fails_does_not_lose_the_step_before(tmp_path) -> None:
    assert carried(tmp_path / "fails", fails=True) == ["pass 0", "a", "pass 0 saved"]


def test_the_heartbeat_says_what_this_process_is_at(tmp_path) -> None:
    """It said "waiting" for as long as any unit took, and gave no sign of life before a unit's end."""
    work, seen = Workdir.open(tmp_path, {}), []

    def look(_: object = None) -> None:
        beat = json.loads(work.path(HEARTBEAT).read_text())
        seen.append((beat["done"], beat["workers"][0]["unit"], beat["workers"][0]["done"]))

    steps = [Step("pass 0", 0, False, look), Step("expert a", 0, False, Task("a")), Step("pass 1", 2, False, look)]
    carry_out(SimpleNamespace(work=work), "stage", steps, Here(look, lambda *_: None), Progress(work))
    look()
    assert seen == [(0, "pass 0", 0), (1, "a", 0), (2, "pass 1", 1), (3, None, 1)]
