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


def graph_ms(run: Callable[[], Any], times: int = 9) -> float:
    """Median milliseconds of a call captured as a graph, which leaves out Python's share of many small launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay, times)


def attempt(run: Callable[[], Any]) -> Any:
    """A variant that fails is a result too."""
    try:
        return run()
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {error}"[:300]
