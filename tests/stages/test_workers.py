"""The same bytes from this process, from local workers and from a Ray cluster, whoever is killed on the way."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small import digest

from keys35.engine import pool as engine
from keys35.engine.local import LocalCrew
from keys35.progress import Progress, Tick
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.workers import Workers


def checkpoint(finished, root: Path, workers: Workers, show=None) -> dict[str, str]:
    """The small model's checkpoint, made by these workers; hashes of all that assembly writes."""
    with open_job(finished.source, finished.recipe, root / "work") as job:
        progress = Progress(job.work, show)
        measure(job, progress, workers)
        allocate(job)
        quantize(job, progress, workers)
        assemble(job, root / "out", progress)
    return digest(root / "out")


def expected(finished) -> dict[str, str]:
    """What this process alone made, without what later stages add to it."""
    later = ("KEYS35_QUALITY.json", "KEYS35_REPORT.html", "KEYS35_MEASUREMENTS.json", "KEYS35_MAKING.json", "README.md")
    return {name: value for name, value in digest(finished.out).items() if name not in later}


def begun(root: Path) -> list[str]:
    from keys35.files.ledger import Workdir

    return [event["unit"] for event in Workdir.open(root / "work", None).events() if event["event"] == "begun"]


def test_two_workers_make_the_same_bytes_and_show_themselves(finished, tmp_path: Path) -> None:
    ticks: list[Tick] = []
    assert checkpoint(finished, tmp_path, Workers(2), ticks.append) == expected(finished)
    assert len(begun(tmp_path)) == len(set(begun(tmp_path)))
    measured = [tick for tick in ticks if tick.stage == "measure"]
    assert len(measured[-1].workers) == 2 and measured[-1].done == measured[-1].total
    assert sum(worker["done"] for worker in measured[-1].workers) == 2 + 1  # groups of one layer, a part of the weights


@pytest.mark.slow
def test_four_workers_make_the_same_bytes(finished, tmp_path: Path) -> None:
    assert checkpoint(finished, tmp_path, Workers(4)) == expected(finished)


@contextmanager
def killing(monkeypatch: pytest.MonkeyPatch, kills: int, chance: random.Random) -> Iterator[set[int]]:
    """Kill a random worker every now and then, up to so many; mostly ones that are at work."""
    crews: list[LocalCrew] = []
    killed: set[int] = set()
    start, listen = LocalCrew.__init__, LocalCrew.listen

    def remember(self, *arguments):
        start(self, *arguments)
        crews.append(self)

    def listen_and_kill(self, timeout: float):
        events = listen(self, min(timeout, chance.uniform(0.05, 2.0)))
        victim = self.pid(chance.randrange(self.size))
        if not events and len(killed) < kills and victim not in killed | {None}:
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        return events

    monkeypatch.setattr(LocalCrew, "__init__", remember)
    monkeypatch.setattr(LocalCrew, "listen", listen_and_kill)
    monkeypatch.setattr(engine, "STARTS_IN_VAIN", kills + 1)
    monkeypatch.setattr(engine, "DEATHS_PER_TASK", kills + 1)
    yield killed


@pytest.mark.slow
def test_twenty_workers_killed_change_nothing(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with killing(monkeypatch, 20, random.Random(35)) as killed:
        assert checkpoint(finished, tmp_path, Workers(2)) == expected(finished)
    assert len(killed) == 20
    repeated = len(begun(tmp_path)) - len(set(begun(tmp_path)))
    print(f"20 workers killed, {repeated} of {len(set(begun(tmp_path)))} units repeated")
    assert repeated <= 20


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_makes_the_same_bytes(finished, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        workers = Workers(2, "ray", cluster.address)
        assert checkpoint(finished, tmp_path, workers) == expected(finished)
    finally:
        cluster.shutdown()
    assert len(begun(tmp_path)) == len(set(begun(tmp_path)))
