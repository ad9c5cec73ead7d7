"""Run an iterator in a thread of its own, a bounded number of items ahead of whoever consumes it."""

import threading
from collections.abc import Iterable, Iterator
from queue import Empty, Full, Queue
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 0.1


def ahead(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield `items` in order while up to `depth` more are being made; close the generator to stop the thread.

    What the iterator raises is raised here, in its turn.
    """
    queue: Queue[tuple[str, Any]] = Queue(depth)
    stopped = threading.Event()

    def put(kind: str, value: Any) -> None:
        while not stopped.is_set():
            try:
                queue.put((kind, value), timeout=PATIENCE_S)
                return
            except Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put("item", item)
                if stopped.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        while thread.is_alive():  # it may wait for room
            try:
                queue.get_nowait()
            except Empty:
                thread.join(PATIENCE_S)
