"""Down projections corrected for lossy gate and up, against augmented least squares in float64."""

import pytest
import torch

from keys35.calibration.compensation import RIDGES, corrected_downs
from keys35.calibration.statistics import MoeRows
from keys35.recipe import Calibration

D, F, T = 12, 8, 64  # eight rows a feature, fewer than are enough: all of them are used


def made(rows=T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=generator)
    moe = MoeRows(x, torch.zeros(rows, 1, dtype=torch.int64), torch.rand(rows, 1, generator=generator) + 0.1)
    shapes = (D, F), (D, F), (F, D)
    return moe, tuple(torch.randn(*shape, generator=generator) / shape[0] ** 0.5 for shape in shapes)


def shrunk(weights):
    """Gate and up with an error that a down projection can take back: they are a fifth too small."""
    return tuple(0.8 * w for w in weights[:2])


def output_error(x, weights, lossy, down):
    def out(gate, up, down):
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    exact = out(*weights)
    return float((out(*lossy, down) - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize(("choice", "power"), [("weighted", 2), ("routed", 0)])
def test_the_correction_is_one_of_the_ridge_regressions(choice, power):
    moe, weights = made()
    lossy = shrunk(weights)
    found = corrected_downs(moe, 0, weights, {2: lossy}, Calibration(hessian=choice))[2]

    gate, up, down = (w.double() for w in weights)
    x, g = moe.x.double(), moe.weights.double() ** power
    h = torch.nn.functional.silu(x @ gate) * (x @ up)
    q = torch.nn.functional.silu(x @ lossy[0].double()) * (x @ lossy[1].double())
    root, distances = (g / g.sum()).sqrt(), []
    for share in RIDGES:
        ridge = share * ((root * q).square().sum() / F)
        tall = torch.cat([root * q, ridge.sqrt() * torch.eye(F, dtype=torch.double)])
        wanted = torch.cat([root * (h @ down), ridge.sqrt() * down])
        distances.append(float((found.double() - torch.linalg.lstsq(tall, wanted).solution).abs().max()))
    assert min(distances) < 1e-5 < sorted(distances)[1]


def test_it_takes_back_what_can_be_predicted_on_rows_it_has_not_seen():
    moe, weights = made()
    lossy = shrunk(weights)
    found = corrected_downs(moe, 0, weights, {2: lossy, 8: weights[:2]}, Calibration())
    fresh = made(rows=500, seed=7)[0].x
    assert torch.allclose(found[8], weights[2], atol=1e-6)
    assert output_error(fresh, weights, lossy, found[2]) < 0.2 * output_error(fresh, weights, lossy, weights[2])


def test_an_error_without_pattern_is_left_alone_or_nearly():
    moe, weights = made()
    noise = torch.Generator().manual_seed(5)
    lossy = tuple(w + 0.3 * w.std() * torch.randn(w.shape, generator=noise) for w in weights[:2])
    found = corrected_downs(moe, 0, weights, {2: lossy}, Calibration())[2]
    fresh = made(rows=500, seed=7)[0].x
    assert output_error(fresh, weights, lossy, found) < 1.03 * output_error(fresh, weights, lossy, weights[2])


@pytest.mark.parametrize("rows", [0, 1])
def test_an_expert_with_hardly_any_rows_keeps_its_down_projection(rows):
    moe, weights = made()
    moe.expert_ids[rows:] = 1
    assert corrected_downs(moe, 0, weights, {2: shrunk(weights)}, Calibration())[2] is weights[2]


def test_rows_that_are_not_finite_change_nothing():
    moe, weights = made()
    moe.x[0, 0] = float("inf")
    assert torch.equal(corrected_downs(moe, 0, weights, {2: shrunk(weights)}, Calibration())[2], weights[2])


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(),
                                                                           reason="needs a CUDA device")])],
)  # fmt: skip
def test_a_width_alone_gets_what_it_gets_among_others(device):
    """Which lets a job encode again only the width that it chose."""
    moe, weights = made()
    weights = tuple(w.to(device) for w in weights)
    lossy = {2: shrunk(weights), 3: tuple(0.9 * w for w in weights[:2])}
    together = corrected_downs(moe, 0, weights, lossy, Calibration())
    for width, parts in lossy.items():
        assert torch.equal(corrected_downs(moe, 0, weights, {width: parts}, Calibration())[width], together[width])
        assert not torch.equal(together[width], weights[2])
