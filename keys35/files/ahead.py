"""Work done in a thread of its own, one item ahead of whoever consumes it: of an iterator, or from call to call."""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

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


class Ahead(Generic[T]):
    """Makes one thing by name in a thread while the one before it is used; no more than these two exist."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        """make: from a name to the thing."""
        self._make = make
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._coming: tuple[Hashable, Future[T]] | None = None

    def begin(self, name: Hashable) -> None:
        """Make a thing now that will be taken next."""
        self._coming = name, self._thread.submit(self._make, name)

    def take(self, name: Hashable, then: Hashable | None = None) -> T:
        """The thing of this name, made before if it was the last `then`; `then` begins as soon as it is there.

        What making it raises is raised here.
        """
        coming, self._coming = self._coming, None
        known = coming is not None and coming[0] == name
        made = (coming[1] if known else self._thread.submit(self._make, name)).result()
        if then is not None:
            self.begin(then)
        return made
