"""Simulated encodings against real ones: the same errors, on a Hessian of unequal channels and without one."""

from dataclasses import replace

import pytest
import torch

from keys35.exl3.codebook import codebook_table
from keys35.exl3.encode import EncodeOptions, LinearJob, encode_group
from keys35.exl3.linear import decode_weight
from keys35.exl3.scale import FULL_POWERS, best_scale, rounding_error
from keys35.exl3.simulate import simulate_group
from keys35.exl3.viterbi import get_backend, prepare

OPTIONS = EncodeOptions(backend="cpu", powers=FULL_POWERS)
K, N = 256, 256


@pytest.fixture(scope="module")
def linears():
    generator = torch.Generator().manual_seed(8)
    spread = torch.exp(torch.randn(K, generator=generator))
    mixing = torch.randn(K, K, generator=generator) / K**0.5
    x = (torch.randn(4 * K, K, generator=generator) * spread) @ (torch.eye(K) + mixing)
    weights = torch.randn(2, K, N, generator=generator) * torch.exp(0.3 * torch.randn(2, 1, N, generator=generator))
    jobs = [LinearJob("with", weights[0], "h"), LinearJob("without", weights[1], None)]
    return jobs, {"h": x.T @ x / len(x)}


def error(job, weight, hessians):
    hessian = hessians[job.hessian].double() if job.hessian else torch.eye(K, dtype=torch.double)
    wrong, whole = (job.weight - weight).double(), job.weight.double()
    return float((wrong * (hessian @ wrong)).sum() / (whole * (hessian @ whole)).sum())


@pytest.mark.parametrize("bits", [2, 3.5])
def test_errors_are_those_of_an_encoding(linears, bits):
    """But for what the scales' refit gains, most where channels are as unequal as these."""
    jobs, hessians = linears
    simulated = simulate_group(jobs, hessians, bits, OPTIONS, 0)
    encoded = encode_group(jobs, hessians, [bits], OPTIONS, 0)
    for job in jobs:
        parts = encoded[job.name, bits]
        real = error(job, decode_weight(parts.trellis, parts.suh, parts.svh), hessians)
        assert error(job, simulated[job.name], hessians) == pytest.approx(real, rel=0.12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_errors_like_those_of_its_own_encodings(linears):
    jobs, hessians = linears
    options = replace(OPTIONS, backend="cuda")
    simulated, encoded = simulate_group(jobs, hessians, 2, options, 0), encode_group(jobs, hessians, [2], options, 0)
    again = simulate_group(jobs, hessians, 2, options, 0)
    for job in jobs:
        parts = encoded[job.name, 2]
        real = error(job, decode_weight(parts.trellis, parts.suh, parts.svh), hessians)
        assert simulated[job.name].device.type == "cpu" and torch.equal(simulated[job.name], again[job.name])
        assert error(job, simulated[job.name], hessians) == pytest.approx(real, rel=0.12)


def test_feedback_is_what_makes_them_small(linears):
    jobs, hessians = linears
    [shaped] = simulate_group(jobs[:1], hessians, 3, OPTIONS, 0).values()
    [flat] = simulate_group([LinearJob("with", jobs[0].weight, None)], {}, 3, OPTIONS, 0).values()
    assert error(jobs[0], shaped, hessians) < 0.7 * error(jobs[0], flat, hessians)


def test_they_depend_on_name_and_seed_but_not_on_their_company(linears):
    jobs, hessians = linears
    together = simulate_group(jobs, hessians, 3, OPTIONS, 0)
    for job in jobs:
        assert torch.equal(simulate_group([job], hessians, 3, OPTIONS, 0)[job.name], together[job.name])
    assert not torch.equal(simulate_group(jobs, hessians, 3, OPTIONS, 1)["with"], together["with"])


@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8])
def test_the_table_of_rounding_errors_is_the_searchs(bits):
    prepare("cpu", frozenset([bits]))
    tiles = torch.randn(160, 256, generator=torch.Generator().manual_seed(2))
    states = get_backend("cpu").encode_tiles(tiles * best_scale(bits), bits).view(torch.int16).int() & 0xFFFF
    values = codebook_table("mul1", "cpu")[states] / best_scale(bits)
    found = float((values - tiles).double().square().mean() / tiles.double().square().mean())
    assert found == pytest.approx(rounding_error(bits), rel=0.05)
