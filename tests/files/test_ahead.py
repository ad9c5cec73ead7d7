"""An iterator one item ahead: order, errors in their turn, no more than two items, no thread left."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from keys35.files.ahead import Ahead, ahead


def numbers(count: int, made: list[int]) -> Iterator[int]:
    for number in range(count):
        made.append(number)
        yield number


def test_order_and_at_most_one_ahead() -> None:
    made, before = [], threading.active_count()
    for number in ahead(numbers(20, made)):
        time.sleep(0.005)
        assert number + 1 <= len(made) <= number + 2
    assert made == list(range(20)) and threading.active_count() == before


def test_an_error_comes_in_its_turn() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("two")

    items = ahead(broken())
    assert next(items) == 1
    with pytest.raises(KeyError, match="two"):
        next(items)


def test_closing_early_ends_the_thread() -> None:
    made, before = [], threading.active_count()
    with closing(ahead(numbers(1000, made))) as items:
        assert next(items) == 0
    assert threading.active_count() == before and len(made) <= 3


def test_by_name_the_next_thing_is_made_while_one_is_used() -> None:
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        if name == "broken":
            raise KeyError(name)
        return name.upper()

    things = Ahead(make)
    assert things.take("a", then="b") == "A"
    while made != ["a", "b"]:
        time.sleep(0.001)
    assert things.take("b", then="broken") == "B" and made.count("b") == 1
    assert things.take("c") == "C", "what was made for nothing does no harm, not even its error"
    with pytest.raises(KeyError, match="broken"):
        things.take("broken")
