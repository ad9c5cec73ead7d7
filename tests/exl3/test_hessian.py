import pytest
import torch
from conftest import random_hessian
from torch import Tensor

from keys35.exl3.hadamard import rotate_in, rotate_out
from keys35.exl3.hessian import factor_hessian

SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(64)


def test_the_factor_block_diagonalises_the_rotated_hessian() -> None:
    hessian = random_hessian(256)
    factor = factor_hessian(hessian, SIGNS, 0.025)
    rotated = rotate_out(rotate_in(hessian / hessian.diagonal().mean() * SIGNS * SIGNS[:, None])).double()
    rotated += 0.025 * rotated.diagonal().mean() * torch.eye(256)
    inverse = torch.linalg.inv(factor.feedback.double() + torch.eye(256))
    blocks = inverse @ rotated @ inverse.T
    outside = ~torch.block_diag(*[torch.ones(16, 16, dtype=torch.bool)] * 16)
    assert blocks[outside].abs().max() < 1e-5
    assert torch.linalg.eigvalsh(blocks).min() > 0
    assert (factor.damping, factor.fallback) == (0.025, False)


def test_feedback_is_strictly_block_lower() -> None:
    feedback = factor_hessian(random_hessian(256), SIGNS, 0.025).feedback
    kept = torch.block_diag(*[torch.ones(16, 16)] * 16) + torch.triu(torch.ones(256, 256)) > 0
    assert not feedback[kept].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_hessian_that_is_not_finite_falls_back(value: float) -> None:
    hessian = random_hessian(256)
    hessian[3, 200] = value
    factor = factor_hessian(hessian, SIGNS, 0.025)
    assert factor.fallback and factor.feedback is None


@pytest.mark.parametrize("hessian", [None, torch.zeros(256, 256), torch.eye(256) * 1e-30])
def test_a_hessian_without_information_falls_back(hessian: Tensor | None) -> None:
    assert factor_hessian(hessian, SIGNS, 0.025).fallback


def rank_one() -> Tensor:
    x = torch.randn(256, 1, generator=torch.Generator().manual_seed(0))
    return x @ x.T


def ill_conditioned() -> Tensor:
    basis = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))[0]
    return basis * torch.logspace(0, -12, 256) @ basis.T


def zero_row() -> Tensor:
    hessian = random_hessian(256)
    hessian[7], hessian[:, 7] = 0, 0
    return hessian


@pytest.mark.parametrize(
    "hessian", [rank_one(), ill_conditioned(), zero_row()], ids=["rank 1", "1e12", "zero row"]
)
def test_poor_hessians_succeed_with_recorded_damping(hessian: Tensor) -> None:
    factor = factor_hessian(hessian, SIGNS, 0.025)
    assert not factor.fallback and factor.damping >= 0.025
    assert torch.isfinite(factor.feedback).all()


def test_an_indefinite_hessian_is_damped_until_it_factors() -> None:
    hessian = random_hessian(256)
    hessian -= 0.1 * hessian.diagonal().mean() * torch.eye(256)
    factor = factor_hessian(hessian, SIGNS, 0.025)
    assert not factor.fallback and factor.damping > 0.025
