from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    """A weight, a Hessian, and what another encoder made of them at 2, 3, 4, 5 and 8 bits."""
    return load_file(Path(__file__).parent / "data/golden.safetensors")


@pytest.fixture(scope="session")
def golden_hessian(golden: dict[str, Tensor]) -> Tensor:
    return golden["hessian_sum"] / golden["hessian_count"]


def random_weight(k: int, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(k, 1, generator=generator) + 0.5
    return torch.randn(k, n, generator=generator) * rows * 0.02


def random_hessian(k: int, seed: int = 0) -> Tensor:
    """The mean of x x^T over correlated inputs of uneven size."""
    generator = torch.Generator().manual_seed(1000 + seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    inputs = torch.randn(4 * k, k, generator=generator) @ mix * (0.2 + torch.rand(k, generator=generator))
    return inputs.T @ inputs / len(inputs)
