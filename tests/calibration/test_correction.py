"""Weights fitted to a quantized prefix, against augmented least squares in float64 and on rows they have not seen."""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keys35.calibration.correction import RIDGES, PairedInputs, _climb
from keys35.stages.prefix_cost import SQUARES

IN, OUT, ROWS = 12, 5, 96


def made(rows: int = ROWS, seed: int = 0, scale: float = 0.8, noise: float = 0.1):
    """The source's inputs, and those of a prefix that has made them smaller and noisy."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, IN, generator=generator)
    return x, scale * x + noise * torch.randn(rows, IN, generator=generator)


def weight() -> torch.Tensor:
    return torch.randn(IN, OUT, generator=torch.Generator().manual_seed(9))


def sums(x: torch.Tensor, q: torch.Tensor) -> PairedInputs:
    found = PairedInputs()
    half = torch.arange(len(x)) % 2 == 0
    for part in (slice(0, 40), slice(40, None)):
        found.add(x[part], q[part], half[part])
    return found


def output_error(fitted: torch.Tensor) -> float:
    x, q = made(rows=2000, seed=7)
    return float((q @ fitted - x @ weight()).square().sum())


def test_the_hessian_is_the_mean_over_both_halves() -> None:
    x, q = made()
    assert torch.allclose(sums(x, q).finish(), q.T @ q / ROWS, atol=1e-5)


class Memory(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most = weakref.WeakKeyDictionary(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.live[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.most = max(self.most, sum(self.live.values()))
        return found


def test_a_correction_keeps_to_the_memory_that_is_planned() -> None:
    """Squares of a linear's inputs: GLM-5.3's o_proj has 16,384 of them."""
    n, out = 1024, 8
    q = torch.randn(n, n, generator=torch.Generator().manual_seed(2))
    parts, half = list(q.clone().split(128)), torch.arange(128) % 2 == 0
    with Memory() as memory:
        found = PairedInputs()
        while parts:
            part = parts.pop().clone()
            found.add(part, 0.9 * part, half)
        fitted = found.corrected(torch.ones(n, out))
        squares = memory.most / (4 * n * n)
        found.finish()
    assert not torch.equal(fitted, torch.ones(n, out)) and SQUARES - 1 < squares < SQUARES + 0.1, squares


def test_the_correction_lies_on_the_way_to_a_ridge_regression() -> None:
    x, q = (part.double() for part in made())
    step = sums(x.float(), q.float()).corrected(weight()).double() - weight().double()
    directions = []
    for share in RIDGES:
        ridge = share * q.square().sum() / IN
        tall = torch.cat([q, ridge.sqrt() * torch.eye(IN, dtype=torch.double)])
        wanted = torch.cat([x @ weight().double(), ridge.sqrt() * weight().double()])
        fit = torch.linalg.lstsq(tall, wanted).solution - weight().double()
        directions.append(float(torch.cosine_similarity(step.flatten(), fit.flatten(), 0)))
    assert max(directions) > 1 - 1e-6 and float(step.norm()) > 0


def test_it_lowers_the_error_on_rows_it_has_not_seen() -> None:
    assert output_error(sums(*made()).corrected(weight())) < 0.5 * output_error(weight())


def missing(x: torch.Tensor) -> torch.Tensor:
    """What a state lacks: part of it can be told from the inputs."""
    generator = torch.Generator().manual_seed(5)
    lost = x @ torch.randn(IN, OUT, generator=generator)
    return 0.3 * lost + 0.1 * torch.randn(len(x), OUT, generator=generator)


def test_what_is_missing_beside_it_is_made_up_for() -> None:
    """The direction is that of a ridge regression to the source's output and the missing part together."""
    x, q = made()
    found, half = PairedInputs(), torch.arange(len(x)) % 2 == 0
    found.add(x, q, half, missing(x))
    step = (found.corrected(weight()) - weight()).double()
    wanted = x.double() @ weight().double() + missing(x).double()
    directions = []
    for share in RIDGES:
        ridge = share * q.double().square().sum() / IN
        tall = torch.cat([q.double(), ridge.sqrt() * torch.eye(IN, dtype=torch.double)])
        fit = torch.linalg.lstsq(tall, torch.cat([wanted, ridge.sqrt() * weight().double()])).solution
        fit -= weight().double()
        directions.append(float(torch.cosine_similarity(step.flatten(), fit.flatten(), 0)))
    assert max(directions) > 1 - 1e-6
    x, q = made(rows=2000, seed=7)
    lost = [(q @ fitted - x @ weight() - missing(x)).square().sum()
            for fitted in (found.corrected(weight()), sums(*made()).corrected(weight()))]
    assert lost[0] < 0.5 * lost[1]


def test_a_state_far_larger_than_what_is_added_to_it_is_left_alone() -> None:
    """Weights a million times as large would make up for it, and could not be stored."""
    x, q = made()
    found, half = PairedInputs(), torch.arange(len(x)) % 2 == 0
    found.add(1e-6 * x, 1e-6 * q, half, missing(x))
    plain = PairedInputs()
    plain.add(1e-6 * x, 1e-6 * q, half)
    assert torch.equal(found.corrected(weight()), plain.corrected(weight()))


def test_without_an_error_of_the_prefix_the_weight_stays() -> None:
    x, _ = made()
    assert torch.equal(sums(x, x).corrected(weight()), weight())


@pytest.mark.parametrize("rows", [0, 2])
def test_hardly_any_rows_correct_nothing(rows: int) -> None:
    x, q = made(rows)
    found = PairedInputs()
    if rows:
        found.add(x, q, torch.arange(rows) % 2 == 0)
    assert torch.equal(found.corrected(weight()), weight())


def test_rows_that_are_not_finite_correct_nothing() -> None:
    x, q = made()
    q[3, 2] = float("inf")
    assert torch.equal(sums(x, q).corrected(weight()), weight())


@pytest.mark.parametrize("best", range(5))
def test_a_climb_ends_where_trying_all_would(best: int) -> None:
    asked: list[int] = []

    def judged(place: int) -> tuple[float, float, float]:
        asked.append(place)
        return -float(abs(place - best)), 1.0, float(place)

    assert _climb([partial(judged, place) for place in range(5)])[2] == best
    assert len(asked) == len(set(asked)) and (len(asked) == 3 or best != 2)
