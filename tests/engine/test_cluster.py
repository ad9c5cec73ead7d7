"""Workers of a Ray cluster that are lost in one of Ray's ways; a cluster itself is in tests/stages/test_workers.py."""

from types import SimpleNamespace

import pytest

from keys35.engine.cluster import RayCrew
from keys35.engine.task import Died, Task

ray = pytest.importorskip("ray")
exceptions = ray.exceptions


def a_handle() -> SimpleNamespace:
    call = SimpleNamespace(remote=lambda *_: object())
    return SimpleNamespace(open=call, do=call)


def fake_cluster(monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], **more: object) -> None:
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: a_handle()))
    fakes = {"init": lambda **_: None, "cluster_resources": lambda: resources, "nodes": lambda: [{"Alive": True}],
             "remote": lambda **_: lambda _: actor, "wait": lambda waiting, **_: (waiting[:1], [])}
    for name, fake in (fakes | more).items():
        monkeypatch.setattr(ray, name, fake)


@pytest.mark.parametrize(("resources", "asked"), [
    ({"GPU": 2.0}, {"num_gpus": 1, "num_cpus": 0}),
    ({"memory": 1e9}, {"num_cpus": 0.0}),
    ({"CPU": 3.0}, {"num_cpus": 1.0}),
])  # fmt: skip
def test_workers_ask_for_no_cpu_where_the_cluster_has_none(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], asked: dict[str, float]
) -> None:
    needs = {}
    fake_cluster(monkeypatch, resources, remote=lambda **found: needs.update(found) or (lambda _: None))
    RayCrew("module:function", "argument", "auto", 0)
    assert needs == {"max_restarts": 0} | asked


@pytest.mark.parametrize("lost", [
    exceptions.ActorDiedError(),
    exceptions.OutOfMemoryError("the memory monitor ended a worker of node 7\nTop 10 memory users:"),
    exceptions.NodeDiedError("node 7 is gone"),
], ids=lambda lost: type(lost).__name__)  # fmt: skip
def test_a_lost_worker_is_replaced_whatever_ray_calls_it(monkeypatch: pytest.MonkeyPatch, lost: Exception) -> None:
    def get(_: object) -> None:
        raise lost

    fake_cluster(monkeypatch, {"CPU": 2.0}, get=get)
    crew = RayCrew("module:function", "argument", "auto", 1)
    crew.start(0)
    assert crew.listen(0) == [Died(0, str(lost).splitlines()[0])]
    crew.start(0)
    crew.give(0, Task("unit"))
    assert all(isinstance(event, Died) for event in crew.listen(0))
