"""Why an expert has its width: held against the receipts and the allocation."""

import pytest

from keys35.errors import BudgetError
from keys35.stages.allocate import load_allocation
from keys35.stages.costs import read_measured
from keys35.stages.explain import explain, sentences
from keys35.stages.job import resume_job


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
