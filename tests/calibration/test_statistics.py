"""Statistics of a captured layer, against sums written out by hand in float64."""

import pytest
import torch

from keys35.calibration import statistics
from keys35.calibration.statistics import Capture, MoeRows, expert_hessians
from keys35.recipe import Calibration

D, F, T = 6, 5, 40


def rows(ids, weights=None):
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor(ids)
    x = torch.randn(len(ids), D, generator=generator)
    weights = torch.rand(ids.shape, generator=generator) if weights is None else torch.tensor(weights)
    return MoeRows(x, ids, weights)


def expert(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(D, F, generator=generator), torch.randn(D, F, generator=generator)


def by_hand(moe, number, gate, up, power):
    gate_up, down, total = torch.zeros(D, D).double(), torch.zeros(F, F).double(), 0.0
    for token in range(len(moe.x)):
        for slot in range(moe.expert_ids.shape[1]):
            if moe.expert_ids[token, slot] == number:
                x = moe.x[token].double()
                inner = torch.nn.functional.silu(x @ gate.double()) * (x @ up.double())
                g = moe.weights[token, slot].double() ** power
                gate_up += g * torch.outer(x, x)
                down += g * torch.outer(inner, inner)
                total += g
    return gate_up / total, down / total


@pytest.mark.parametrize(("choice", "power"), [("weighted", 2), ("routed", 0)])
def test_disjoint_token_sets_give_their_own_hessians(choice, power):
    moe = rows([[0] if t % 2 else [1] for t in range(T)])
    gate, up = expert()
    recipe = Calibration(hessian=choice, shrink=0)
    layer = (moe.x.T @ moe.x) / T
    for number in (0, 1):
        found = expert_hessians(moe, layer, number, gate, up, recipe)
        gate_up, down = by_hand(moe, number, gate, up, power)
        share = D / (D + found.rows)
        assert found.rows == T // 2
        assert torch.allclose(found.gate_up.double(), gate_up * (1 - share) + layer.double() * share, rtol=1e-4)
        inner = torch.nn.functional.silu(moe.x @ gate) * (moe.x @ up)
        share = F / (F + found.rows)
        every = (inner.T @ inner / T).double()
        assert torch.allclose(found.down.double(), down * (1 - share) + every * share, rtol=1e-4)


def test_an_expert_without_rows_leans_on_the_layer():
    moe = rows([[0]] * T)
    layer = torch.eye(D)
    found = expert_hessians(moe, layer, 3, *expert(), Calibration())
    assert found.rows == 0 and torch.equal(found.gate_up, layer)
    assert torch.isfinite(found.down).all() and found.down.trace() > 0


def test_the_sample_of_all_tokens_meets_every_place_of_a_window_alike(monkeypatch):
    """First tokens, whose states are like no others, came up as often as the step has its factor 2 from the window."""
    monkeypatch.setattr(statistics, "ALL_TOKEN_ROWS", 64)
    gate, up = expert()
    x = torch.full((64 * 16, D), 0.01)
    x[::16] = torch.linspace(1, 2, D)
    moe = MoeRows(x, torch.ones(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))
    found = expert_hessians(moe, torch.eye(D), 0, gate, up, Calibration())
    every = torch.nn.functional.silu(x @ gate) * (x @ up)
    assert found.rows == 0 and found.down.trace() == pytest.approx(float((every.T @ every / len(x)).trace()), rel=0.1)


def test_zero_router_weights_are_finite():
    moe = rows([[0]] * T, [[0.0]] * T)
    found = expert_hessians(moe, torch.eye(D), 0, *expert(), Calibration())
    assert torch.isfinite(found.gate_up).all() and torch.isfinite(found.down).all()


def test_counts_add_up_to_tokens_times_k():
    ids = [[t % 5, (t + 1) % 5] for t in range(T)]
    moe = rows(ids)
    assert sum(len(moe.of(e)[0]) for e in range(5)) == T * 2


@pytest.mark.parametrize("block", [3, 2048])
def test_capture_is_the_mean_outer_product_per_distinct_input(block, monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK", block)  # products of blocks above the diagonal alone, or of all at once
    capture = Capture(16)
    parts = [torch.randn(7, D), torch.randn(9, D)]
    for part in parts:
        where = torch.zeros(len(part), 2, dtype=torch.long)
        capture.linear_input(("model.layers.3.self_attn.q_a_proj", "model.layers.3.self_attn.kv_a_proj"), part, where)
    x = torch.cat(parts).double()
    assert torch.allclose(capture.hessians()["self_attn.q_a_proj"].double(), x.T @ x / 16, rtol=1e-5)
    assert capture.carrier == {k: "self_attn.q_a_proj" for k in ("self_attn.q_a_proj", "self_attn.kv_a_proj")}
    assert capture.moe_rows() is None


def test_rows_survive_the_disk():
    moe = rows([[0, 1]] * 4)
    back = MoeRows.from_tensors(moe.tensors("fit"), "fit")
    assert torch.equal(back.x, moe.x) and torch.equal(back.expert_ids, moe.expert_ids)
    assert torch.equal(back.weights, moe.weights)
