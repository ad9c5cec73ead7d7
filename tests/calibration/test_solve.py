"""Systems solved together, against float64 one by one."""

import pytest
import torch

from keys35.calibration.solve import BLOCK, solve


@pytest.mark.parametrize("size", [1, 8, BLOCK, 2 * BLOCK + 7])
def test_many_systems_at_once(size):
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(2, 3, 2 * size + 4, size, generator=generator)
    systems = rows.mT @ rows / len(rows) + 0.1 * torch.eye(size)
    right = torch.randn(2, 3, size, 5, generator=generator)
    kept = systems.clone()
    wanted = torch.linalg.solve(systems.double(), right.double())
    found = solve(systems, right)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert torch.equal(systems, kept)


def test_a_system_without_a_factor_has_no_finite_solution_and_the_others_have():
    systems = torch.stack([torch.eye(2 * BLOCK), torch.eye(2 * BLOCK), torch.full((2 * BLOCK, 2 * BLOCK), torch.inf)])
    systems[1, -1, -1] = -1
    found = solve(systems, torch.ones(3, 2 * BLOCK, 1))
    assert torch.equal(found[0], torch.ones(2 * BLOCK, 1))
    assert not torch.isfinite(found[1]).all() and not torch.isfinite(found[2]).any()
