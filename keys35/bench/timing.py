"""How long a call takes on the GPU, by its own clock."""

import statistics
from collections.abc import Callable
from typing import Any

import torch


def milliseconds(run: Callable[[], Any], times: int = 7) -> float:
    """Median milliseconds of a call on the GPU, the first one left out."""
    run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)
