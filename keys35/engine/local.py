"""Workers as processes of this machine: one JSON line per task on their stdin, one per answer on a pipe back."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keys35.engine.task import Died, Event, Task, answer

STOP_S = 5.0


class LocalCrew:
    """`size` processes, each of which imports `factory` ("module:function") and calls it with `argument`.

    The function returns the one that does tasks. `environments[slot]` is added to the worker's environment, say its
    GPU and its number of threads.
    """

    def __init__(self, factory: str, argument: str, environments: Sequence[Mapping[str, str]]) -> None:
        self.size = len(environments)
        self._command = [sys.executable, "-m", "keys35.engine.serve", factory, argument]
        self._environments = environments
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._unread: dict[int, bytes] = {}

    def pid(self, slot: int) -> int | None:
        """Process id of the worker in a slot."""
        process = self._processes.get(slot)
        return process.pid if process else None

    def start(self, slot: int) -> None:
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path} | dict(self._environments[slot])
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
        )
        self._processes[slot], self._unread[slot] = process, b""
        self._selector.register(process.stdout, selectors.EVENT_READ, slot)

    def give(self, slot: int, task: Task) -> None:
        try:
            self._processes[slot].stdin.write(task.line().encode() + b"\n")
        except BrokenPipeError:
            pass  # it has died, which `listen` is about to see

    def listen(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self._selector.select(timeout):
            slot, data = key.data, os.read(key.fd, 1 << 16)
            *lines, self._unread[slot] = (self._unread[slot] + data).split(b"\n")
            events += [answer(slot, json.loads(line)) for line in lines]
            if not data:
                events.append(Died(slot, self._bury(slot)))
        return events

    def stop(self) -> None:
        for process in self._processes.values():
            process.stdin.close()  # a worker ends with its stdin
        for slot in list(self._processes):
            try:
                self._processes[slot].wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._processes[slot].kill()
            self._bury(slot)
        self._selector.close()

    def _bury(self, slot: int) -> str:
        """Reap a worker that has closed its pipe; how it ended, in words."""
        process = self._processes.pop(slot)
        self._selector.unregister(process.stdout)
        process.stdin.close()
        process.stdout.close()
        code = process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

