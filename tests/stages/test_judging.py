"""Errors at a layer's output against sums written out in float64."""

from dataclasses import replace

import pytest
import torch

from keys35.calibration.statistics import MoeRows
from keys35.exl3.encode import EncodeOptions, LinearJob, encode_group
from keys35.exl3.linear import decode_weight
from keys35.stages.expert_encoding import LayerRows, expert_names
from keys35.stages.judging import decoded, judge

D, F, T, WIDTHS = 128, 128, 40, [2, 4]
GPU = pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])


@pytest.fixture(scope="module")
def layer():
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(T)])
    ids[ids == 3] = 0  # nobody chooses expert 3, and some rows choose expert 0 twice over: by two slots
    selection = MoeRows(torch.randn(T, D, generator=generator), ids, torch.rand(T, 2, generator=generator))
    domain, half = torch.arange(T) % 3, torch.arange(T) >= T // 2
    rows = LayerRows(selection, selection.counts(4), selection, domain, half, 3, torch.eye(D))
    weights = {e: tuple(torch.randn(D, F, generator=generator) / D**0.5 for _ in range(3)) for e in (0, 2, 3)}
    jobs = [LinearJob(name, w, None) for e, parts in weights.items()
            for name, w in zip(expert_names(1, e), parts, strict=True)]
    return rows, weights, encode_group(jobs, {}, WIDTHS, EncodeOptions(backend="cpu"), 0)


def output(x, parts):
    gate, up, down = (part.double() for part in parts)
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def judged_on(device, rows, weights, encoded):
    weights = {expert: tuple(part.to(device) for part in parts) for expert, parts in weights.items()}
    encoded = {name: replace(p, trellis=p.trellis.to(device), suh=p.suh.to(device), svh=p.svh.to(device))
               for name, p in encoded.items()}
    return judge(weights, decoded(1, encoded), WIDTHS, rows.to(torch.device(device)))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_every_figure_is_the_sum_it_says_it_is(layer, device):
    """Energies within what short products (ten bits of mantissa on a GPU) lose of an output; errors hardly less."""
    whole, lost = (1e-4, 1e-3) if device == "cpu" else (1e-3, 5e-3)
    rows, weights, encoded = layer
    found = judged_on(device, rows, weights, encoded)
    assert found[3].rows == 0 and found[3].error == [[0.0] * 3] * 2 and found[3].energy == [0.0] * 3
    for expert in (0, 2):
        lossy = [[decode_weight(p.trellis, p.suh, p.svh) for p in (encoded[n, w] for n in expert_names(1, expert))]
                 for w in WIDTHS]
        per_row = torch.zeros(1 + len(WIDTHS), T, 2, dtype=torch.double)
        for row, slot in (rows.selection.expert_ids == expert).nonzero().tolist():
            x, g = rows.selection.x[row].double(), float(rows.selection.weights[row, slot])
            exact = output(x, weights[expert])
            per_row[0, row, slot] = g**2 * exact.square().sum()
            for i, parts in enumerate(lossy):
                per_row[1 + i, row, slot] = g**2 * (output(x, parts) - exact).square().sum()
        judged = found[expert]
        assert judged.rows == int((per_row[0] > 0).sum())
        for d in range(3):
            here = rows.domain == d
            mean = per_row[:, here].sum((1, 2)) / here.sum()
            assert judged.energy[d] == pytest.approx(float(mean[0]), rel=whole)
            assert [w[d] for w in judged.error] == pytest.approx(mean[1:].tolist(), rel=lost)
            spread = per_row[1:, here].square().sum((1, 2)).sqrt() / here.sum()
            assert [w[d] for w in judged.error_se] == pytest.approx(spread.tolist(), rel=lost)
            for h in (0, 1):
                mine = here & (rows.half == bool(h))
                part = per_row[:, mine].sum((1, 2)) / mine.sum()
                assert [w[d] for w in judged.error_by_half[h]] == pytest.approx(part[1:].tolist(), rel=lost)
                assert judged.energy_by_half[h][d] == pytest.approx(float(part[0]), rel=whole)


def test_an_expert_alone_is_judged_as_among_others(layer):
    rows, weights, encoded = layer
    together = judge(weights, decoded(1, encoded), WIDTHS, rows)
    assert judge({2: weights[2]}, decoded(1, encoded), WIDTHS, rows)[2] == together[2]
