"""A GPU's queues of work: pieces that leave most of it idle go side by side."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch


@contextmanager
def side_by_side(device: torch.device, count: int) -> Iterator[list[AbstractContextManager[object]]]:
    """So many queues: what is launched inside `with queue:` runs beside the others' on a GPU, in turn on a CPU.

    They begin behind what was launched before, and what is launched afterwards comes behind them, so memory may pass
    either way; between queues nothing may.
    """
    if device.type != "cuda":
        yield [nullcontext()] * count
        return
    main, streams = torch.cuda.current_stream(device), [_stream(device, number) for number in range(count)]
    for stream in streams:
        stream.wait_stream(main)
    try:
        yield [torch.cuda.stream(stream) for stream in streams]
    finally:
        for stream in streams:
            main.wait_stream(stream)


@lru_cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same ones every time: a stream keeps the memory that was freed on it."""
    return torch.cuda.Stream(device)
