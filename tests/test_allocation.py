"""The allocation against brute force, and the budgets it must refuse."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keys35.allocation import bit_counts, exact_allocation, mean_width, per_layer, random_mix, whole_model
from keys35.errors import BudgetError


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(0, 1e3)] * 3), min_size=1, max_size=6),
    st.sampled_from([(2, 3, 4), (2, 4, 5), (1, 2, 8)]),
    st.data(),
)
def test_never_dearer_than_any_other_mix(costs, widths, data):
    costs = np.array(costs)
    mixes = list(product(range(3), repeat=len(costs)))
    wanted = data.draw(st.sampled_from(sorted({sum(widths[i] for i in mix) for mix in mixes})))
    chosen = exact_allocation(costs, widths, Fraction(wanted, len(costs)))
    assert chosen.sum() == wanted
    price = sum(row[widths.index(int(w))] for row, w in zip(costs, chosen, strict=True))
    best = min(
        sum(row[i] for row, i in zip(costs, mix, strict=True))
        for mix in mixes
        if sum(widths[i] for i in mix) == wanted
    )
    assert price == pytest.approx(best)


def test_256_experts_at_2_75_stay_within_2_3_4():
    rng = np.random.default_rng(0)
    costs = np.exp(rng.normal(size=(256, 1))) * np.array([[0.0677, 0.0176, 0.0047]])
    chosen = exact_allocation(costs, (2, 3, 4), Fraction(11, 4))
    assert mean_width([chosen]) == Fraction(11, 4)
    assert set(chosen.tolist()) <= {2, 3, 4}


@pytest.mark.parametrize("mean", ["2", "3", "4", "2.75", "2.25", "3.5"])
def test_every_mean_of_the_range(mean):
    costs = np.random.default_rng(1).random((24, 3))
    assert exact_allocation(costs, (2, 3, 4), Fraction(mean)).mean() == float(mean)


@pytest.mark.parametrize(
    ("costs", "mean", "message"),
    [
        (np.ones((3, 3)), Fraction(11, 4), "no whole number"),
        (np.ones((4, 3)), Fraction(5), "outside"),
        (np.full((4, 3), np.nan), Fraction(3), "not finite"),
        (-np.ones((4, 3)), Fraction(3), "negative"),
    ],
)
def test_refusals(costs, mean, message):
    with pytest.raises(BudgetError, match=message):
        exact_allocation(costs, (2, 3, 4), mean)


def test_no_mix_reaches_the_mean():
    with pytest.raises(BudgetError, match="no mix"):
        exact_allocation(np.ones((2, 2)), (2, 4), Fraction(5, 2))


def test_scopes():
    costs = [np.array([[9.0, 1, 0.1]] * 4), np.array([[0.9, 0.1, 0.01]] * 4)]
    each = per_layer(costs, (2, 3, 4), Fraction(11, 4))
    assert [layer.mean() for layer in each] == [2.75, 2.75]
    whole = whole_model(costs, (2, 3, 4), Fraction(11, 4))
    assert mean_width(whole) == Fraction(11, 4) and whole[0].mean() > whole[1].mean()


def test_random_mixes_are_exact_and_differ():
    mixes = [random_mix([8, 8, 8], Fraction(11, 4), seed) for seed in range(5)]
    assert all(bit_counts(mix) == {2: 6, 3: 18} for mix in mixes)
    assert len({tuple(np.concatenate(mix)) for mix in mixes}) == 5
