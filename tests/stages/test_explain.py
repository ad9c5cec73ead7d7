"""Why an expert has its width: held against the receipts and the allocation."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_recipe

from keys35.errors import BudgetError
from keys35.stages.allocate import allocate, load_allocation
from keys35.stages.costs import read_measured
from keys35.stages.explain import explain, sentences
from keys35.stages.job import resume_job
from keys35.stages.units import expert_units


def test_costs_ranks_and_margins_are_the_allocations(finished):
    with resume_job(finished.work) as job:
        measured, allocation = read_measured(job), load_allocation(job)[1]
        found = [explain(job, 1, expert) for expert in range(4)]
    costs = measured.costs()[0]
    assert [e.width for e in found] == allocation
    assert [list(e.cost.values()) for e in found] == costs.tolist()
    order = sorted(range(4), key=lambda expert: -costs[expert, 0])
    assert [found[expert].rank_in_layer for expert in order] == [1, 2, 3, 4]
    for one in found:
        assert sum(one.by_domain["2"].values()) == pytest.approx(one.cost["2"])
        assert (one.saving is None) == (one.width == 3)
        if one.saving is not None:
            assert one.saving == pytest.approx(one.cost["2"] - one.cost["3"])
    assert sum(one.energy_share for one in found) == pytest.approx(1)
    assert "Layer 1, expert 2:" in sentences(found[2])[0]


def test_an_expert_that_is_not_there_is_refused(finished):
    with resume_job(finished.work) as job, pytest.raises(BudgetError, match="no allocated expert 4"):
        explain(job, 1, 4)


def test_widths_by_lot_are_said_to_be(tiny):
    """This model's text is too little, so that costs decide nothing; no held-out token chose its first expert."""
    with resume_job(tiny.work) as job:
        silent, chosen = (explain(job, 1, expert) for expert in (0, 1))
    assert (silent.basis, silent.saving, silent.paid) == ("random", None, None)
    assert set(silent.error_se.values()) == {None} and silent.selection_rows == 0
    assert "no held-out token chose it" in sentences(silent)[2] and "error known to" in sentences(chosen)[2]
    assert "widths are a random mix" in sentences(silent)[-1]
    report = json.loads((tiny.out / "KEYS35_ASSEMBLY_REPORT.json").read_text())
    assert report["width_basis"] == "random" and "in prose, code: widths are a random mix" in report["warnings"][0]


def test_how_well_a_cost_is_known_is_of_all_domains_together(tiny):
    with resume_job(tiny.work) as job:
        measured, found = read_measured(job), explain(job, 1, 1)
        data = job.work.require(expert_units(job, 1)[1].name)["data"]
    for column, width in enumerate(measured.widths):
        error, spread = (np.array(data[key][0][column]) for key in ("error", "error_se"))
        nats = [(a * e, a * s) for a, e, s in zip(measured.share * measured.alpha[0], error, spread, strict=True)]
        wanted = sum(spread**2 for _, spread in nats) ** 0.5 / sum(cost for cost, _ in nats)
        assert found.error_se[str(width)] == pytest.approx(wanted)


@pytest.mark.parametrize(("scope", "profile"), [("layer", "per-expert"), ("model", "uniform-layer")])
def test_what_others_paid_is_of_the_same_budget(tiny, tmp_path, scope, profile):
    """A layer with a mean of its own buys nothing elsewhere; a layer of one width is bought as a whole."""
    work = shutil.copytree(tiny.work, tmp_path / "work")
    experts = {"widths": [3, 4], "bits": 3.5, "group": 1, "scope": scope, "fallback": False}
    with resume_job(work) as job:
        job = replace(job, recipe=tiny_recipe(experts=experts, output={"shards": 6, "profile": profile}))
        weights = np.array(allocate(job)["choice"]["domain_weights"])
        allocation, costs = load_allocation(job), [layer @ weights for layer in read_measured(job).costs_by_domain()]
        found = {layer: [explain(job, layer, expert) for expert in range(4)] for layer in (1, 2)}
    if profile == "uniform-layer":
        assert {(one.basis, one.saving) for layer in found.values() for one in layer} == {("layers", None)}
        assert "by what all of its experts cost together" in sentences(found[1][0])[-1]
        return
    for layer, cost in zip((1, 2), costs, strict=True):
        saved = cost[:, 0] - cost[:, 1]
        paid = min(saved[expert] for expert in range(4) if allocation[layer][expert] == 4)
        narrow = [one for one in found[layer] if one.width == 3]
        assert len(narrow) == 2
        assert all(one.paid == pytest.approx(paid) and one.saving <= one.paid for one in narrow)
