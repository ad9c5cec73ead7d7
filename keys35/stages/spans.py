"""Where the time of a unit went, by kind of work; for the log, never for a receipt."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Spans:
    """Seconds by name. A span ends when the device has done what was asked of it inside; one inside another counts
    for itself alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._begun = time.perf_counter()
        self._inner = 0.0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the block's time to `name`."""
        begun, before, self._inner = time.perf_counter(), self._inner, 0.0
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spent = time.perf_counter() - begun
        self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner
        self._inner = before + spent

    def facts(self) -> dict[str, float]:
        """Seconds by name and in all, to the millisecond; peak bytes of device memory since, where there is a GPU."""
        spent = {**self.seconds, "all": time.perf_counter() - self._begun}
        facts: dict[str, float] = {name: round(value, 3) for name, value in spent.items()}
        if self._device.type == "cuda":
            facts["peak_device_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return facts
