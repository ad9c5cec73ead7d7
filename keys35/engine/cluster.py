"""Workers as actors of a Ray cluster; tasks and answers are text, results go through the shared work directory."""

import importlib.util
import os
from typing import Any

from keys35.engine.serve import attempt, open_work, where
from keys35.engine.task import Died, Event, Task, answer
from keys35.errors import WorkerError


class RayCrew:
    """`size` actors (0: one per GPU of the cluster, else one per node), each with a GPU if there are any.

    Raises WorkerError when Ray is not installed, the cluster does not answer, or has too few GPUs.
    """

    def __init__(self, factory: str, argument: str, address: str, size: int) -> None:
        if importlib.util.find_spec("ray") is None:
            raise WorkerError("--engine ray needs Ray on every machine: pip install 'keys35[ray]'")
        import ray
        from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

        # The last two are none of the first: an actor that Ray's memory monitor ended, and one whose machine went.
        self._ray, self._gone = ray, (RayActorError, OutOfMemoryError, NodeDiedError)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"no Ray cluster answers at '{address}' ({error}); start one with `ray start --head` and "
                              "`ray start --address HEAD:6379` on the others") from error
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        nodes = sum(node["Alive"] for node in ray.nodes())
        self.size = size or gpus or nodes
        if gpus and self.size > gpus:
            raise WorkerError(f"{self.size} workers asked, the cluster has {gpus} GPUs; one worker drives one GPU")
        share = resources.get("CPU", 0) / self.size  # a cluster may offer none, as with `ray start --num-cpus 0`
        needs = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": min(1.0, int(100 * share) / 100)}
        self._actor = ray.remote(max_restarts=0, **needs)(_Actor)
        self._arguments = (factory, argument, 0 if gpus else max(1, int(share)))
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {}

    def start(self, slot: int) -> None:
        self._actors[slot] = self._actor.options(scheduling_strategy="SPREAD").remote(*self._arguments)
        self._waiting[self._actors[slot].open.remote()] = slot

    def give(self, slot: int, task: Task) -> None:
        self._waiting[self._actors[slot].do.remote(task.line())] = slot

    def listen(self, timeout: float) -> list[Event]:
        ready, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=timeout)
        events: list[Event] = []
        for reference in ready:
            slot = self._waiting.pop(reference)
            try:
                events.append(answer(slot, self._ray.get(reference)))
            except self._gone as error:
                events.append(Died(slot, str(error).splitlines()[0]))
        return events

    def stop(self) -> None:
        self._ray.shutdown()  # actors end with the driver that owns them


class _Actor:
    """One worker of the cluster, seen from its own process."""

    def __init__(self, factory: str, argument: str, threads: int) -> None:
        if threads:  # before torch and numba are imported
            os.environ |= {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
        self._opening = (factory, argument)
        self._work = None

    def open(self) -> dict[str, Any]:
        """Import what does the work; slow, and not part of the actor's creation so that a refusal comes back."""
        opened: list[Any] = []
        result = attempt(lambda: opened.append(open_work(*self._opening)))
        if result["kind"] == "failed":
            return result
        self._work = opened[0]
        return {"kind": "ready", "where": where()}

    def do(self, line: str) -> dict[str, Any]:
        """One task."""
        return attempt(lambda: self._work(Task.read(line)))

