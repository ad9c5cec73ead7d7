"""A worker's side: `python -m keys35.engine.serve MODULE:FUNCTION ARGUMENT`, started by a crew."""

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from keys35.engine.task import Task
from keys35.errors import Keys35Error, ResumeError, out_of_memory
from keys35.warned import Warned

Work = Callable[[Task], None]
ORPHANED = 3


def open_work(factory: str, argument: str) -> Work:
    """Import "module:function" and call it; what it returns does tasks."""
    module, _, function = factory.partition(":")
    return getattr(importlib.import_module(module), function)(argument)


def attempt(work: Callable[[], Any]) -> dict[str, Any]:
    """Do something; seconds it took, or the exception's name and message (a traceback where it is our fault)."""
    started = time.monotonic()
    try:
        work()
    except Keys35Error as error:
        return {"kind": "failed", "error": type(error).__name__, "message": str(error)}
    except OSError as error:
        return {"kind": "failed", "error": ResumeError.__name__, "message": str(error)}
    except Exception as error:
        if (refusal := out_of_memory(error)) is not None:
            return {"kind": "failed", "error": type(refusal).__name__, "message": str(refusal)}
        return {"kind": "failed", "error": type(error).__name__, "message": traceback.format_exc()}
    return {"kind": "done", "seconds": time.monotonic() - started}


def where() -> str:
    """Host and process, for people."""
    return f"{os.uname().nodename}:{os.getpid()}"


def _tasks() -> Iterator[Task]:
    """Tasks from stdin. The process ends with its stdin, also in the middle of a task: its driver is gone."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(ORPHANED)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield Task.read(lines.get())


def main() -> None:
    """Serve tasks until stdin ends; answers and warnings go to the pipe, whatever libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends its workers
    pipe = os.dup(1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with speaking:
            while line:
                line = line[os.write(pipe, line) :]

    speaking = threading.Lock()
    Warned(lambda words: answer({"kind": "warned", "message": words})).listen()
    opened: list[Work] = []
    result = attempt(lambda: opened.append(open_work(*sys.argv[1:3])))
    if result["kind"] == "failed":
        answer(result)
        return
    answer({"kind": "ready", "where": where()})
    for task in _tasks():
        answer(attempt(lambda task=task: opened[0](task)))


if __name__ == "__main__":
    main()
