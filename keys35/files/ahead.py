"""Run an iterator in a thread of its own, one item ahead of whoever consumes it."""

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield `items` in order; while one is consumed the next is being made, and no more than these two exist.

    What the iterator raises is raised here, in its turn. Close the generator to stop the thread.
    """
    made: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    wanted, stopped = threading.Semaphore(1), threading.Event()

    def make() -> None:
        try:
            iterator = iter(items)
            while wanted.acquire() and not stopped.is_set():
                try:
                    made.put(("item", next(iterator)))
                except StopIteration:
                    made.put(("end", None))
                    return
        except BaseException as error:
            made.put(("error", error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = made.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            wanted.release()
            yield value
            del value
    finally:
        stopped.set()
        wanted.release()
        thread.join()
