"""The allocation against brute force, and the budgets it must refuse."""

import time
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keys35 import allocation
from keys35.allocation import (
    bit_counts,
    exact_allocation,
    fair_allocation,
    mean_width,
    per_layer,
    random_mix,
    rank_correlation,
    whole_model,
)
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.5])] * 3), min_size=1, max_size=9),
    st.sampled_from([(2, 3, 4, 5), (2, 2.5, 3, 3.5), (2, 4, 6, 8)]),
    st.data(),
)
def test_errors_that_fall_less_and_less_need_no_programme(saved, widths, data):
    """Many are alike: the same experts are picked as by the programme, which takes any costs."""
    saved = -np.sort(-np.array(saved), axis=1)
    costs = np.cumsum(saved[:, ::-1], axis=1)[:, ::-1]
    costs = np.concatenate([costs, np.zeros((len(costs), 1))], axis=1)
    step = Fraction(widths[1]) - widths[0]
    raised = data.draw(st.integers(0, 3 * len(costs)))
    chosen = exact_allocation(costs, widths, widths[0] + step * raised / len(costs))
    extras = [int((width - widths[0]) / step) for width in widths]
    assert np.array_equal(allocation._step_by_step(costs, extras, raised), allocation._programme(costs, extras, raised))
    assert np.array_equal(chosen, np.asarray(widths)[allocation._programme(costs, extras, raised)])


def test_19200_experts_take_no_programme(monkeypatch):
    monkeypatch.setattr(allocation, "_programme", None)
    costs = np.exp(np.random.default_rng(0).normal(size=(19200, 1))) * np.array([[0.0677, 0.0176, 0.0047]])
    begun = time.process_time()
    assert mean_width([exact_allocation(costs, (2, 3, 4), Fraction(11, 4))]) == Fraction(11, 4)
    assert time.process_time() - begun < 1


@pytest.mark.parametrize("widths", [(2, 3, 4), (2, 2.5, 3, 3.5, 4)])
def test_a_few_experts_of_odd_errors_make_no_programme_of_all(widths):
    """With half rates each solution took ten seconds and half a gigabyte, and fairness asks for a hundred of them."""
    rng = np.random.default_rng(0)
    costs = np.exp(rng.normal(size=(19200, 1))) * 4.0 ** -np.array(widths)
    odd = rng.choice(19200, size=20, replace=False)
    costs[odd] = -np.sort(-rng.random((20, len(widths))), axis=1) * costs[odd, :1]
    begun = time.process_time()
    chosen = exact_allocation(costs, widths, Fraction(11, 4))
    assert time.process_time() - begun < 1
    assert mean_width([chosen]) == Fraction(11, 4) and len(set(chosen[odd].tolist())) > 1
    column = np.searchsorted(widths, chosen)
    paid = costs[np.arange(19200), column].sum()
    for one in odd:  # no odd expert may have another width, whoever gives or takes the bits for that
        for other in range(len(widths)):
            rest = np.delete(costs, one, axis=0)
            left = Fraction(11, 4) * 19200 - Fraction(widths[other])
            again = exact_allocation(rest, widths, left / 19199)
            cost = rest[np.arange(19199), np.searchsorted(widths, again)].sum() + costs[one, other]
            assert cost >= paid * (1 - 1e-12)


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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e3)] * 4), min_size=1, max_size=5), st.data())
def test_half_rates_are_as_exact_as_whole_ones(costs, data):
    costs, widths = np.array(costs), (1.5, 2, 2.5, 4)
    mixes = list(product(range(4), repeat=len(costs)))
    wanted = data.draw(st.sampled_from(sorted({sum(widths[i] for i in mix) for mix in mixes})))
    chosen = exact_allocation(costs, widths, Fraction(wanted) / len(costs))
    assert mean_width([chosen]) == Fraction(wanted) / len(costs)
    price = sum(row[widths.index(w)] for row, w in zip(costs, chosen, strict=True))
    best = min(sum(row[i] for row, i in zip(costs, mix, strict=True)) for mix in mixes
               if sum(widths[i] for i in mix) == wanted)
    assert price == pytest.approx(best)


def test_half_rates_beat_the_whole_ones_around_them():
    """Two experts at 2.5 cost less than one at 2 and one at 3: the distortion is convex in the width."""
    costs = np.tile([0.0677, 0.0345, 0.0171], (8, 1))
    chosen = exact_allocation(costs, (2, 2.5, 3), Fraction(11, 4))
    assert bit_counts([chosen]) == {2.5: 4, 3: 4}
    assert [type(width) for width in bit_counts([chosen])] == [float, int]


def test_a_mean_that_half_rates_cannot_have_is_refused():
    with pytest.raises(BudgetError, match="3 experts cannot have a mean of exactly 11/4"):
        exact_allocation(np.ones((3, 3)), (2, 2.5, 3), Fraction(11, 4))


def test_no_domain_is_left_behind():
    """Cheapest on the mean starves the quiet domain; with fairness it gains its share, at the same bits."""
    rng = np.random.default_rng(3)
    error = np.array([0.0677, 0.0171])
    loud, quiet = np.exp(rng.normal(size=(2, 64)))
    costs = [np.stack([10 * loud, quiet], 1)[:, None, :] * error[None, :, None]]
    typical = 0.25 * costs[0][:, 0].sum(0) + 0.75 * costs[0][:, 1].sum(0)

    def gains(fairness):
        chosen, weights = fair_allocation(
            lambda layers: whole_model(layers, (2, 3), Fraction(11, 4)), costs, (2, 3), typical, fairness
        )
        assert mean_width(chosen) == Fraction(11, 4)
        price = costs[0][np.arange(64), np.array(chosen[0]) - 2].sum(0)
        return 1 - price / typical, 1 - price.sum() / typical.sum(), weights

    by_domain, mean, weights = gains(0)
    assert by_domain.min() < 0.75 * mean and weights.tolist() == [1, 1]
    by_domain, mean, weights = gains(0.75)
    assert by_domain.min() >= 0.75 * mean > 0 and weights[1] > 1 > weights[0]


@pytest.mark.filterwarnings("error")
def test_text_that_no_expert_was_judged_on_asks_for_no_fairness():
    """A half of the held-out text may have no window at all: 0 / 0, and a hundred rounds for nothing."""
    solved = []

    def solve(layers):
        solved.append(layers)
        return whole_model(layers, (2, 3), Fraction(5, 2))

    chosen, weights = fair_allocation(solve, [np.zeros((4, 2, 2))], (2, 3), np.zeros(2), 0.5)
    assert mean_width(chosen) == Fraction(5, 2) and weights.tolist() == [1, 1] and len(solved) == 1


@pytest.mark.parametrize(("a", "b", "wanted"), [
    ([1, 5, 2, 9], [2, 6, 3, 7], 1), ([1, 2, 3], [3, 2, 1], -1), ([0, 0, 0, 0], [1, 2, 3, 4], 0), ([2], [7], 1),
    ([0, 0, 1, 2], [1, 2, 3, 4], np.sqrt(0.9)),  # ranks 1.5, 1.5, 3, 4: 4.5 / sqrt(4.5 * 5)
])
def test_ties_are_of_no_order(a, b, wanted):
    """In order of place, costs of which half are zero agreed with whatever the numbering of the experts was."""
    for pair in ((a, b), (b, a), (a[::-1], b[::-1])):
        assert rank_correlation(*map(np.array, pair)) == pytest.approx(wanted)
