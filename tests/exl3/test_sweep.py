"""A sweep over finished tiles, against the objective computed from the definition in float64."""

import pytest
import torch

from keys35.exl3.codebook import codebook_table
from keys35.exl3.hessian import damped_metric, factor_hessian
from keys35.exl3.ldlq import ldlq
from keys35.exl3.sweep import sweep
from keys35.exl3.tiles import from_ring
from keys35.exl3.viterbi import get_backend

K, N, BITS = 256, 64, 2.0


def objective(weights, metric, states, scales):
    """tr(E^T H E) of each tile (k/16, n/16 summed over k), float64: nothing of the sweep's own sums."""
    decoded = torch.cat([
        from_ring(codebook_table("mul1", "cpu")[row[None, None].int() & 0xFFFF])[0] / scales[place // 8]
        for place, row in enumerate(states)
    ])
    error = (weights - decoded).double()
    return (error * (metric.double() @ error)).sum(0).view(-1, 16).sum(1)


@pytest.fixture(scope="module")
def encoded():
    torch.manual_seed(0)
    weights, mixing = torch.randn(3, K, N), torch.randn(2, K, K)
    hessians = [m @ m.T / K for m in mixing]
    factors = [factor_hessian(h, torch.ones(K), 0.01) for h in hessians]
    metrics = [damped_metric(h / h.diagonal().mean(), torch.ones(K), f.damping)
               for h, f in zip(hessians, factors, strict=True)]
    feedbacks = [f.feedback for f in factors] + [None]
    return weights, [*metrics, None], *ldlq(weights, feedbacks, BITS, get_backend("cpu"))


def test_every_column_of_tiles_gets_better_or_stays_and_nothing_else_changes(encoded):
    weights, metrics, states, scales = encoded
    before = states.clone()
    swept = sweep(weights, metrics, states, scales, BITS, get_backend("cpu"))
    assert torch.equal(states, before) and torch.equal(swept[2], states[2])  # no metric to judge by
    for b in (0, 1):
        was, now = (objective(weights[b], metrics[b], found[b], scales[b]) for found in (states, swept))
        assert (now <= was * (1 + 1e-6)).all() and now.sum() < 0.995 * was.sum()


def test_a_weight_swept_alone_has_the_same_bytes(encoded):
    weights, metrics, states, scales = encoded
    together = sweep(weights, metrics, states, scales, BITS, get_backend("cpu"))
    alone = sweep(weights[1:2], metrics[1:2], states[1:2], scales[1:2], BITS, get_backend("cpu"))
    assert torch.equal(together[1:2], alone)
