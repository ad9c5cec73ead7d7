"""What decides the bits of matrix arithmetic: how much mantissa a GPU's float32 products keep, and threads."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

BLOCK = 128  # columns that LAPACK factors on one thread
PIECE = 1 << 14  # elements that torch adds up on one thread

torch.set_float32_matmul_precision("highest")  # with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 torch begins with less


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
    """All bits: for factorisations and what is solved with them, where a small eigenvalue or ridge would get lost."""
    return _products("highest")


def cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The lower factor of (.., n, n), and int32 (..), not 0 where there is none; bits do not depend on threads.

    LAPACK cuts matrices of 256 and more by the number of threads, in which workers differ. Of smaller ones it does not,
    and products, triangular solves and sums along an axis do not depend on it: on a CPU a factor is made of those. Seen
    to hold for sizes that are multiples of BLOCK, as padded linears have; of 300 a product differed at four threads.
    """
    if matrix.is_cuda:
        return torch.linalg.cholesky_ex(matrix)
    lower, failed = matrix.clone(), torch.zeros(matrix.shape[:-2], dtype=torch.int32)
    for start in range(0, matrix.shape[-1], BLOCK):
        here, below = slice(start, start + BLOCK), slice(start + BLOCK, None)
        block, wrong = torch.linalg.cholesky_ex(lower[..., here, here])
        lower[..., here, here], failed = block, failed | wrong
        panel = torch.linalg.solve_triangular(block.mT, lower[..., below, here], upper=True, left=False)
        lower[..., below, here] = panel
        lower[..., below, below] -= panel @ panel.mT
    return lower.tril_(), failed


def vector_sum(values: Tensor) -> Tensor:
    """The sum of a vector (n,), the same bits for any count of threads: torch shares out longer ones."""
    if values.is_cuda:
        return values.sum()
    return torch.stack([part.sum() for part in values.split(PIECE)]).sum()
