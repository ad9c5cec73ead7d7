import numpy as np
import pytest
import torch
from reference_decoder import hadamard

from keys35.exl3.hadamard import rotate_in, rotate_out


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(256, 384, generator=torch.Generator().manual_seed(0))


def test_rotations_are_block_hadamard_products(weight: torch.Tensor) -> None:
    left, right = np.kron(np.eye(2), hadamard()), np.kron(np.eye(3), hadamard())
    exact = weight.double().numpy()
    np.testing.assert_allclose(rotate_in(weight), left @ exact, atol=2e-6)
    np.testing.assert_allclose(rotate_out(weight), exact @ right, atol=2e-6)


def test_rotations_are_their_own_inverse(weight: torch.Tensor) -> None:
    torch.testing.assert_close(rotate_in(rotate_in(weight)), weight, atol=2e-6, rtol=0)
    torch.testing.assert_close(rotate_out(rotate_out(weight)), weight, atol=2e-6, rtol=0)


def test_company_changes_no_bit(weight: torch.Tensor) -> None:
    stack = torch.stack([weight, weight * 3, weight.flip(0)])
    assert torch.equal(rotate_in(stack)[0], rotate_in(weight))
    assert torch.equal(rotate_out(stack)[2], rotate_out(weight.flip(0)))
    assert torch.equal(rotate_in(weight[:, :5].contiguous()), rotate_in(weight)[:, :5])
