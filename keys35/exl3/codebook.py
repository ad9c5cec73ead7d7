"""The three procedural codebooks: a 16-bit state becomes one fp16 value (format notes 1.7)."""

from functools import lru_cache

import torch
from torch import Tensor

MARKERS = {"mul1": 0x83DCD12D, "mcg": 0xCBAC1FED}
"""The word a checkpoint stores beside a trellis; a tensor without a marker uses 3inst."""

CODEBOOKS = ("mul1", "mcg", "3inst")


def _half_bits(low16: Tensor) -> Tensor:
    """Read the low 16 bits of an int64 as an IEEE half, returned as float32."""
    return low16.to(torch.int16).view(torch.float16).float()


def _sum_of_halves(x: Tensor) -> Tensor:
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return _half_bits(x & 0xFFFF) + _half_bits(x >> 16)


def _mul1(x: Tensor) -> Tensor:
    byte_sum = (x & 0xFF) + ((x >> 8) & 0xFF) + ((x >> 16) & 0xFF) + (x >> 24)
    return (byte_sum + 1024).float() * 0.00676727294921875 - 10.3828125


def decode_states(states: Tensor, codebook: str = "mul1") -> Tensor:
    """Decode trellis states to codebook values.

    Shapes: integer states of any shape (int16 is read as unsigned); float32 of the same shape, exact in fp16.
    """
    s = states.to(torch.int64) & 0xFFFF
    if codebook == "mul1":
        value = _mul1((s * MARKERS["mul1"]) & 0xFFFFFFFF)
    elif codebook == "mcg":
        value = _sum_of_halves((s * MARKERS["mcg"]) & 0xFFFFFFFF)
    elif codebook == "3inst":
        value = _sum_of_halves((s * 89226354 + 64248484) & 0xFFFFFFFF)
    else:
        raise ValueError(f"unknown codebook {codebook!r}; one of {', '.join(CODEBOOKS)}")
    return value.half().float()


@lru_cache
def codebook_table(codebook: str = "mul1", device: str = "cpu") -> Tensor:
    """All 65,536 values of a codebook, float32 (65536,). Shared: do not write to it."""
    return decode_states(torch.arange(65536, device=device), codebook)


def marker_tensor(codebook: str = "mul1") -> Tensor:
    """The 0-dimensional int32 marker stored beside a trellis; 3inst has none."""
    value = MARKERS[codebook]
    return torch.tensor(value - (1 << 32) if value >= 1 << 31 else value, dtype=torch.int32)
