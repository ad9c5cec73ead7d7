"""The pool with real processes and work that needs no model: order, deaths, refusals, environments."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from keys35.engine import pool as engine
from keys35.engine.local import LocalCrew
from keys35.engine.pool import DEATHS_PER_TASK, STARTING, Pool, open_pool
from keys35.engine.task import Task
from keys35.errors import EncodeError, WorkerError

FACTORY = "filing:open_filing"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


def crew(root: Path | str, size: int) -> LocalCrew:
    return LocalCrew(FACTORY, str(root), [{"SLOT": str(slot)} for slot in range(size)])


def drain(pool: Pool, seconds: float = 60) -> list[str]:
    ended, until = [], time.monotonic() + seconds
    while pool.outstanding:
        assert time.monotonic() < until
        ended += pool.finished(1)
    return ended


def test_every_task_is_done_once_by_workers_in_their_own_environment(tmp_path: Path) -> None:
    begun: list[str] = []
    with open_pool(crew(tmp_path, 2), lambda task, where: begun.append(task.unit)) as pool:
        for number in range(12):
            pool.submit(Task(f"u{number:02d}", {"seconds": 0.02}))
        ended = drain(pool)
        states = pool.workers()
    assert sorted(ended) == sorted(begun) == sorted(path.name for path in tmp_path.iterdir())
    assert begun == sorted(begun), "tasks begin in the order they were handed in"
    assert {path.read_text().split()[1] for path in tmp_path.iterdir()} == {"0", "1"}
    assert sum(state.done for state in states) == 12 and all(state.deaths == 0 for state in states)


def test_what_a_worker_warns_of_is_said_by_the_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """In its way of speaking: on a worker's stderr it would be plain text among lines of JSON."""
    with open_pool(crew(tmp_path, 1), lambda *_: None) as pool:
        for unit in ("a", "b"):
            pool.submit(Task(unit, {"do": "warn"}))
        assert drain(pool) == ["a", "b"]
        where = pool.workers()[0].where
    said = [record.getMessage() for record in caplog.records]
    assert [f"worker {where}: {unit} has no usable Hessian" in said for unit in "ab"] == [True, True]
    assert sum("divided by zero" in line for line in said) == 1, "Python warns once of a place"
    assert "Hessian" not in capfd.readouterr().err


def test_workers_killed_twenty_times_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEATHS_PER_TASK", 21)
    chance, begun = random.Random(35), []
    workers = crew(tmp_path, 3)
    with open_pool(workers, lambda task, where: begun.append(task.unit)) as pool:
        for number in range(200):
            pool.submit(Task(f"u{number:03d}", {"seconds": 0.03}))
        ended, killed = [], set()
        while pool.outstanding:
            ended += pool.finished(chance.uniform(0.01, 0.15))
            slot = chance.randrange(3)
            victim, young = workers.pid(slot), pool.workers()[slot].where == STARTING
            if len(killed) < 20 and victim not in killed | {None} and not (young and chance.random() < 0.9):
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
        states = pool.workers()
    assert len(killed) == 20 and len(ended) == len(set(ended)) == 200 == len(list(tmp_path.iterdir()))
    assert sum(state.deaths for state in states) == 20
    assert len(begun) - 200 <= 20, "a death costs at most the unit it fell into"


def test_a_unit_that_kills_its_workers_is_given_up_by_name(tmp_path: Path) -> None:
    with open_pool(crew(tmp_path, 1), lambda task, where: None) as pool:
        pool.submit(Task("greedy", {"do": "die"}))
        with pytest.raises(WorkerError, match=f"greedy has cost {DEATHS_PER_TASK} workers.*SIGKILL.*memory"):
            drain(pool)


@pytest.mark.parametrize(("do", "error", "words"), [
    ("refuse", EncodeError, "^bad cannot be encoded$"),
    ("fail", WorkerError, "(?s)failed at bad.*fault of keys35.*ZeroDivisionError: a fault"),
    ("grow", WorkerError, r"^out of memory \(Unable to allocate 9 TiB\); finished work is kept.*fewer --workers"),
])
def test_what_a_task_raises_arrives(tmp_path: Path, do: str, error: type, words: str) -> None:
    with open_pool(crew(tmp_path, 2), lambda task, where: None) as pool:
        pool.submit(Task("good"))
        pool.submit(Task("bad", {"do": do}))
        with pytest.raises(error, match=words):
            drain(pool)


def test_a_worker_that_refuses_to_start_says_why() -> None:
    with open_pool(crew("nowhere", 1), lambda task, where: None) as pool, pytest.raises(EncodeError, match="no place"):
        pool.submit(Task("u"))
        drain(pool)


def test_workers_end_with_their_pool_in_the_middle_of_a_task(tmp_path: Path) -> None:
    workers = crew(tmp_path, 2)
    with open_pool(workers, lambda task, where: None) as pool:
        pool.submit(Task("long", {"seconds": 600}))
        while not any(state.unit for state in pool.workers()):
            pool.finished(0.1)
        pids = [workers.pid(slot) for slot in range(2)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(tmp_path.iterdir())
