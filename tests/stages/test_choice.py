"""On what ground widths are chosen: experts' own costs where two halves of the text agree, less where they do not."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from keys35.calibration.text import load_text_set
from keys35.recipe import Recipe
from keys35.stages import choice
from keys35.stages.costs import Measured

EXPERTS, DOMAINS, WIDTHS = 8, 2, (2, 3)


def measured(scales, layer_scales=(1.0, 1.0)):
    """Two layers whose experts' errors are `scales` (experts,) or (experts, domains), four times less at 3 bits."""
    base = np.broadcast_to(np.asarray(scales, dtype=float).reshape(EXPERTS, -1), (EXPERTS, DOMAINS))
    error = tuple(base[:, None, :] * np.array([1.0, 0.25])[:, None] * scale for scale in layer_scales)
    ones = tuple(np.ones(DOMAINS) for _ in error)
    return Measured((1, 2), WIDTHS, error, tuple(base for _ in error), ones, np.full(DOMAINS, 0.5))


def job(domains=(), **experts):
    recipe = Recipe.model_validate({
        "name": "t", "experts": {"widths": WIDTHS, "bits": 2.75} | experts,
        "calibration": {"set": "demo", "domains": domains},
    })
    return SimpleNamespace(recipe=recipe, text=load_text_set("demo").only(domains))


@pytest.fixture
def chosen(monkeypatch):
    def run(first, second, the_job):
        monkeypatch.setattr(choice, "read_measured", lambda _, half: (first, second)[half])
        mean = tuple((a + b) / 2 for a, b in zip(first.error, second.error, strict=True))
        return choice.choose(the_job, replace(first, error=mean))
    return run


RISING = np.arange(1.0, EXPERTS + 1)


def test_halves_that_agree_let_each_expert_have_its_own_width(chosen):
    found = chosen(measured(RISING), measured(RISING * 1.1), job())
    assert found.basis == "experts" and found.correlation == 1.0
    assert [list(row).index(3) for row in found.widths] == [2, 2]  # the two cheapest of each layer have 2 bits
    assert set(found.gains) == {"prose", "code"} and min(found.gains.values()) > 0.1
    assert choice.reason(found.facts()) is None


def test_halves_that_contradict_leave_a_random_mix(chosen):
    found = chosen(measured(RISING), measured(RISING[::-1]), job())
    assert found.basis == "random" and sum(row.sum() for row in found.widths) == 2.75 * 2 * EXPERTS
    assert found.correlation < -0.9 and "at random" in choice.reason(found.facts())


def test_a_random_mix_keeps_the_mean_of_every_layer_where_that_is_asked_for(chosen):
    found = chosen(measured(RISING), measured(RISING[::-1]), job(scope="layer", fairness=0))
    assert found.basis == "random" and [row.mean() for row in found.widths] == [2.75, 2.75]


def test_one_domain_that_loses_is_enough_and_is_named(chosen):
    both = np.stack([RISING, 5 * RISING], 1)
    turned = np.stack([RISING, 5 * RISING[::-1]], 1)
    found = chosen(measured(both), measured(turned), job())
    assert found.basis == "random" and "code" in choice.reason(found.facts())


def test_a_domain_that_was_not_read_is_named(chosen, monkeypatch):
    monkeypatch.setattr("test_choice.DOMAINS", 1)
    found = chosen(measured(RISING), measured(RISING), job(["prose"]))
    assert found.missing == ("code",) and found.basis == "random"
    assert "lacks its set's domains code" in choice.reason(found.facts())


def test_a_domain_with_little_held_out_text_is_named(chosen):
    the_job = job()
    calibration = the_job.recipe.calibration.model_copy(update={"selection_windows": 7})  # 4 and 3 of 2,048 tokens
    the_job.recipe = the_job.recipe.model_copy(update={"calibration": calibration})
    found = chosen(measured(RISING), measured(RISING), the_job)
    assert found.basis == "random" and len(found.scant) == 1
    assert f"(calibration.selection_windows) in {found.scant[0]}" in choice.reason(found.facts())


def test_without_fallback_experts_costs_are_followed_with_a_warning(chosen):
    found = chosen(measured(RISING), measured(RISING[::-1]), job(fallback=False))
    assert found.basis == "experts" and "follow it all the same" in choice.reason(found.facts())


def test_a_set_of_one_domain_is_followed_and_said_to_be_one():
    facts = {"basis": "experts", "gains": {"law": 0.2}, "missing": [], "scant": []}
    assert "one domain, 'law'" in choice.reason(facts)
