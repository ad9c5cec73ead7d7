"""Every metric against a slow float64 implementation written from its definition."""

import math

import numpy as np
import pytest
import torch

from keys35.runtime import metrics
from keys35.runtime.metrics import NO_LABEL, MtpMetrics, PanelMetrics

VOCAB = 50


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(3)
    reference = [torch.randn(n, VOCAB, generator=generator) * 3 for n in (40, 25, 31)]
    logits = [x + torch.randn(x.shape, generator=generator) for x in reference]
    labels = [torch.randint(0, VOCAB, (len(x),), generator=generator) for x in reference]
    for label in labels:
        label[-1] = NO_LABEL
    return reference, logits, labels, ["prose", "code", "prose"]


def score(pair) -> dict:
    result = PanelMetrics()
    for window, (p, q, labels, domain) in enumerate(zip(*pair, strict=True)):
        result.add(window, domain, p, q, labels)
    return result.result()


def naive(reference, logits, labels) -> dict[str, float]:
    kl, reverse, top1, top2, five_p, five_q, nll_p, nll_q = ([] for _ in range(8))
    for p_row, q_row, label in zip(reference.tolist(), logits.tolist(), labels.tolist(), strict=True):
        p_sum, q_sum = (math.fsum(math.exp(v) for v in row) for row in (p_row, q_row))
        p, q = [math.exp(v) / p_sum for v in p_row], [math.exp(v) / q_sum for v in q_row]
        kl.append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        reverse.append(math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True)))
        order_p, order_q = (sorted(range(VOCAB), key=lambda i, r=r: -r[i])[:5] for r in (p_row, q_row))
        top1.append(order_p[0] == order_q[0])
        top2.append(order_p[:2] == order_q[:2])
        if label != NO_LABEL:
            five_p.append(label in order_p)
            five_q.append(label in order_q)
            nll_p.append(-math.log(p[label]))
            nll_q.append(-math.log(q[label]))
    return {
        "tokens": len(kl),
        "kl": np.mean(kl),
        "kl_reverse": np.mean(reverse),
        "kl_median": np.median(kl),
        "kl_p90": np.percentile(kl, 90),
        "kl_p99": np.percentile(kl, 99),
        "top1": np.mean(top1),
        "top2": np.mean(top2),
        "top5_reference": np.mean(five_p),
        "top5": np.mean(five_q),
        "ppl_reference": math.exp(np.mean(nll_p)),
        "ppl": math.exp(np.mean(nll_q)),
    }


@pytest.mark.parametrize("chunk", [1 << 23, 7 * VOCAB, 1])
def test_all_numbers_equal_the_naive_ones_whatever_the_chunks(pair, monkeypatch, chunk):
    monkeypatch.setattr(metrics, "CHUNK_VALUES", chunk)
    result = score(pair)
    reference, logits, labels, domains = pair
    cases = {None: [0, 1, 2], "prose": [0, 2], "code": [1]}
    for domain, windows in cases.items():
        got = result if domain is None else result["domains"][domain]
        want = naive(*(torch.cat([part[w] for w in windows]) for part in (reference, logits, labels)))
        assert {key: got[key] for key in want} == pytest.approx(want, rel=1e-9)
    for window, got in enumerate(result["per_window"]):
        want = naive(reference[window], logits[window], labels[window])
        assert {key: got[key] for key in want} == pytest.approx(want, rel=1e-9)
        assert got["domain"] == domains[window]


def test_confidence_buckets_partition_the_tokens(pair):
    result = score(pair)
    buckets = result["confidence"]
    assert sum(bucket["tokens"] for bucket in buckets) == result["tokens"]
    assert sum(b["tokens"] * b["kl"] for b in buckets) == pytest.approx(result["tokens"] * result["kl"])
    sure = torch.cat(pair[0]).double().softmax(-1).amax(-1)
    for bucket in buckets:
        assert bucket["tokens"] == int(((sure >= bucket["from"]) & (sure < bucket["to"])).sum())


def test_a_model_against_itself_is_exactly_zero(pair):
    reference, _, labels, domains = pair
    result = score((reference, reference, labels, domains))
    assert result["kl"] == result["kl_reverse"] == result["kl_p99"] == 0
    assert result["top1"] == result["top2"] == 1 and result["ppl"] == result["ppl_reference"]


def test_a_certain_reference_falls_into_the_last_bucket():
    sure = torch.full((2, VOCAB), -1e4)
    sure[:, 3] = 0
    result = PanelMetrics()
    result.add(0, "prose", sure, sure, torch.tensor([3, NO_LABEL]))
    assert result.result()["confidence"] == [{"from": 0.99, "to": 1.0, "tokens": 2, "kl": 0.0, "top1": 1.0}]


def test_mtp_drafts_are_aligned_two_tokens_ahead():
    tokens = torch.tensor([5, 6, 7, 8, 9])
    drafts = torch.tensor([7, 8, 1, 2])  # for tokens 2, 3, 4 and the one after the window
    greedy = torch.tensor([0, 7, 4, 1, 2])  # the trunk's choice after each token
    result = MtpMetrics()
    result.add(drafts, tokens, greedy)
    assert result.result() == {"top1": 2 / 3, "acceptance": 3 / 4}
