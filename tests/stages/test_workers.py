"""The same bytes from this process, from local workers and from a Ray cluster, whoever is killed on the way."""

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small import digest
from tiny import EXPERTS, begun, make_tiny

from keys35.demo import MODEL
from keys35.engine import pool as engine
from keys35.progress import Progress, Tick
from keys35.recipe import load_recipe
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.workers import Workers, _environment


def test_two_workers_make_the_same_bytes_and_show_themselves(tiny, tmp_path: Path) -> None:
    ticks: list[Tick] = []
    assert make_tiny(tiny.source, tmp_path, Workers(2), ticks.append) == digest(tiny.out)
    units = begun(tmp_path / "work")
    assert len(units) == len(set(units))
    last = [tick for tick in ticks if tick.stage == "measure"][-1]
    assert last.done == last.total and len(last.workers) == 2
    assert sum(worker["done"] for worker in last.workers) == 2 * EXPERTS + 1, "experts of two layers, a part of weights"


@pytest.mark.slow
def test_keeping_errors_only_makes_the_same_bytes_from_less(tiny, tmp_path: Path) -> None:
    assert make_tiny(tiny.source, tmp_path, Workers(1), keep="errors") == digest(tiny.out)
    chosen = json.loads((tmp_path / "work/allocation.json").read_text())["sets"]["allocation"]["widths"]
    for layer, widths in enumerate(chosen, 1):  # one expert per unit; 4 is the width that weighs the layers
        held = {f"{expert:04d}-k{width}" for expert, chosen in enumerate(widths) for width in {chosen, 4}}
        assert {path.stem for path in (tmp_path / f"work/experts/layer-{layer:03d}").iterdir()} == held
    assert not list((tmp_path / "work/rows").iterdir()) and len(list((tmp_path / "work/states").iterdir())) == 1


@pytest.mark.slow
def test_four_workers_make_the_same_bytes(tiny, tmp_path: Path) -> None:
    assert make_tiny(tiny.source, tmp_path, Workers(4)) == digest(tiny.out)


@contextmanager
def killing(monkeypatch: pytest.MonkeyPatch, kills: int, chance: random.Random) -> Iterator[set[int]]:
    """Kill a random worker every now and then, up to so many times, most of them in the middle of a unit."""
    killed: set[int] = set()
    finished = engine.Pool.finished

    def finish_and_kill(self: engine.Pool, timeout: float = 1.0) -> list[str]:
        ended = finished(self, min(timeout, chance.uniform(0.05, 1.0)))
        number = chance.randrange(self.size)
        victim, busy = self._crew.pid(number), self.workers()[number].unit is not None
        if len(killed) < kills and victim not in killed | {None} and (busy or chance.random() < 0.05):
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        return ended

    monkeypatch.setattr(engine.Pool, "finished", finish_and_kill)
    monkeypatch.setattr(engine, "STARTS_IN_VAIN", kills + 1)
    monkeypatch.setattr(engine, "DEATHS_PER_TASK", kills + 1)
    yield killed


@pytest.mark.slow
def test_twenty_workers_killed_change_nothing(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with killing(monkeypatch, 20, random.Random(35)) as killed:
        assert make_tiny(tiny.source, tmp_path, Workers(2)) == digest(tiny.out)
    units = begun(tmp_path / "work")
    print(f"{len(killed)} workers killed, {len(units) - len(set(units))} of {len(set(units))} units begun again")
    assert len(killed) == 20 and len(units) - len(set(units)) <= 20


@pytest.mark.parametrize(
    ("asked", "threads"), [(None, "4"), ("", "4"), ("2", "2"), ("9", "4"), ("2,1", "2"), ("x", "4")]
)
def test_workers_share_the_cores_within_what_openmp_is_told(monkeypatch, asked, threads) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert _environment(0, 2, 0) == {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}


@contextmanager
def cluster_of_two() -> Iterator[str]:
    """Two Ray nodes on this machine; the address of their head."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_makes_the_same_bytes(tiny, tmp_path: Path) -> None:
    with cluster_of_two() as address:
        assert make_tiny(tiny.source, tmp_path, Workers(2, "ray", address)) == digest(tiny.out)
    units = begun(tmp_path / "work")
    assert len(units) == len(set(units))


@pytest.mark.slow
def test_the_demo_is_the_same_by_every_engine(tmp_path: Path) -> None:
    """The bundled model with 1, 2 and 4 workers and on two Ray nodes."""
    with cluster_of_two() as address:
        choices = [Workers(1), Workers(2), Workers(4), Workers(2, "ray", address)]
        made = []
        for number, workers in enumerate(choices):
            root = tmp_path / str(number)
            with open_job(MODEL, load_recipe("demo"), root / "work") as job:
                measure(job, Progress(), workers)
                allocate(job)
                quantize(job, Progress(), workers)
                assemble(job, root / "out", Progress())
            made.append(digest(root / "out"))
    assert made[1:] == made[:1] * 3
