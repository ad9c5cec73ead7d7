"""The tile encoders behind one interface; `auto` takes the GPU when there is one.

A backend maps tiles to trellis states, nothing else, so everything above it is the same code on every device.
"""

import importlib
import logging
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ...errors import EncodeError

log = logging.getLogger(__name__)

BACKENDS = {
    "cpu": ("cpu", "CpuBackend"),
    "cuda": ("cuda", "CudaBackend"),
    "exllamav3": ("peer", "PeerBackend"),
}


class ViterbiBackend(Protocol):
    """What a tile encoder offers: deterministic per tile, whatever the batch and the order."""

    name: str

    def encode_tiles(self, tiles: Tensor, bits: float) -> Tensor:
        """float32 (T, 256) in ring order, at mul1's scale, to uint16 or int16 states (T, 256)."""
        ...


@lru_cache
def get_backend(name: str = "auto") -> ViterbiBackend:
    """Load a backend by name: `auto`, `cpu`, `cuda` or `exllamav3`.

    Raises EncodeError when the name is unknown or what the backend needs is not installed.
    """
    if name == "auto":
        return _best_backend()
    if name not in BACKENDS:
        raise EncodeError(f"unknown encoder backend {name!r}; use auto, {', '.join(BACKENDS)}")
    module, factory = BACKENDS[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), factory)()
    except ImportError as error:
        raise EncodeError(f"encoder backend {name!r} cannot run here ({error}); use auto or cpu") from error


def _best_backend() -> ViterbiBackend:
    """Our kernels where there is a GPU, the peer's where ours do not run on it, the CPU otherwise."""
    for name in ("cuda", "exllamav3") if torch.cuda.is_available() else ():
        try:
            return get_backend(name)
        except EncodeError as reason:
            log.warning("not encoding with %s: %s", name, reason)
    return get_backend("cpu")


@lru_cache
def prepare(name: str, widths: frozenset[float]) -> None:
    """Let a backend get ready for widths in the background; those that compile nothing have nothing to do."""
    ready = getattr(get_backend(name), "prepare", None)
    if ready is not None:
        ready(widths)


def backend_device(name: str = "auto") -> torch.device:
    """Where a backend wants its tiles: the CPU, or torch's current CUDA device."""
    on_cpu = get_backend(name).name == "cpu"
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
