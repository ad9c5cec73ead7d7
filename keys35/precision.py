"""How many bits of mantissa a GPU's products of float32 matrices keep; a CPU keeps them all."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def short_products(device: torch.device) -> AbstractContextManager[None]:
    """Ten bits (TF32) on a GPU, some eight times as fast: for what is less exact than that anyway.

    A stored BF16 weight has seven and passes unchanged.
    """
    return _products("high" if device.type == "cuda" else "highest")


def whole_products() -> AbstractContextManager[None]:
    """All bits: for factorisations and Hessians, where a small eigenvalue or ridge would get lost."""
    return _products("highest")
