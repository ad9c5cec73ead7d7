"""On what ground widths are chosen: experts' own costs where two halves of the text agree, less where they do not."""

import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import tiny_recipe

from keys35.allocation import mean_width, random_mix
from keys35.calibration.text import load_text_set
from keys35.recipe import Recipe
from keys35.stages import choice
from keys35.stages.allocate import allocate
from keys35.stages.costs import Measured
from keys35.stages.job import resume_job

EXPERTS, DOMAINS, WIDTHS = 8, 2, (2, 3)
RISING = np.arange(1.0, EXPERTS + 1)


def measured(scales, layer_scales=(1.0, 1.0)):
    """Two layers whose experts' errors are `scales` (experts,) or (experts, domains), four times less at 3 bits."""
    base = np.broadcast_to(np.asarray(scales, dtype=float).reshape(EXPERTS, -1), (EXPERTS, DOMAINS))
    error = tuple(base[:, None, :] * np.array([1.0, 0.25])[:, None] * scale for scale in layer_scales)
    ones = tuple(np.ones(DOMAINS) for _ in error)
    tokens = tuple(np.full(EXPERTS, 100) for _ in error)
    energy, half, nothing = tuple(base for _ in error), np.full(DOMAINS, 0.5), np.zeros(DOMAINS)
    return Measured((1, 2), WIDTHS, error, energy, ones, half, tokens, nothing)


def job(domains=(), profile="per-expert", seed=35, **experts):
    recipe = Recipe.model_validate({
        "name": "t", "experts": {"widths": WIDTHS, "bits": 2.75} | experts, "output": {"profile": profile},
        "calibration": {"set": "demo", "domains": domains}, "seed": seed,
    })
    return SimpleNamespace(recipe=recipe, text=load_text_set("demo").only(domains), folder=Path())


def skewed(layers, seed=0):
    """Measured errors of `layers` layers that differ tenfold between experts, domains and layers."""
    rng = np.random.default_rng(seed)
    found = measured(RISING, np.exp(rng.normal(size=layers)))
    error = tuple(layer * np.exp(rng.normal(size=(EXPERTS, 1, DOMAINS))) for layer in found.error)
    routed = tuple(rng.integers(1, 1000, EXPERTS) for _ in error)
    return replace(found, layers=tuple(range(layers)), error=error, routed=routed)


def cost(found, widths):
    """What widths cost, an average mix 1, summed expert by expert: in each domain, if all tokens of a layer cost alike,
    and if each expert got as many as it lacks of twice the mean."""
    paid, average = np.zeros(DOMAINS + 2), np.zeros(DOMAINS + 2)
    for layer, tokens, row in zip(found.error, found.routed, widths, strict=True):
        left = np.clip(2 * tokens.mean() - tokens, 0, None)
        for expert, width in enumerate(row):
            use = [tokens[expert] / tokens.sum(), left[expert] / left.sum()]
            costs = [np.r_[layer[expert, column], np.multiply(use, layer[:, column].sum())] for column in (0, 1)]
            paid += costs[WIDTHS.index(width)]
            average += 0.25 * costs[0] + 0.75 * costs[1]
    return paid / average


@pytest.fixture
def chosen(monkeypatch):
    def run(first, second, the_job):
        monkeypatch.setattr(choice, "read_measured", lambda _, half: (first, second)[half])
        mean = tuple((a + b) / 2 for a, b in zip(first.error, second.error, strict=True))
        return choice.choose(the_job, replace(first, error=mean))
    return run


def test_halves_that_agree_let_each_expert_have_its_own_width(chosen):
    found = chosen(measured(RISING), measured(RISING * 1.1), job())
    assert found.basis == "experts" and found.correlation == 1.0
    assert [list(row).index(3) for row in found.widths] == [2, 2]  # the two cheapest of each layer have 2 bits
    assert set(found.gains) == {"prose", "code"} and min(found.gains.values()) > 0.1
    assert choice.reason(found.facts()) is None


def test_halves_that_contradict_leave_a_random_mix(chosen):
    found = chosen(measured(RISING), measured(RISING[::-1]), job())
    assert found.basis == "random" and sum(row.sum() for row in found.widths) == 2.75 * 2 * EXPERTS
    assert found.correlation < -0.9 and "widths are a random mix" in choice.reason(found.facts())


def test_a_random_mix_keeps_the_mean_of_every_layer_where_that_is_asked_for(chosen):
    found = chosen(measured(RISING), measured(RISING[::-1]), job(scope="layer", fairness=0))
    assert found.basis == "random" and [row.mean() for row in found.widths] == [2.75, 2.75]


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_the_random_mix_is_a_safe_one_whatever_the_seed(scope):
    """Where it costs most it costs less than all but a few plain mixes do; the budget and the scope are kept."""
    found = skewed(12)
    mixes = [choice.widths_on(job(scope=scope, seed=seed), found, choice.RANDOM)[0] for seed in range(6)]
    parts = [[EXPERTS] * 12] if scope == "model" else [[EXPERTS]] * 12
    plain = [[row for place, part in enumerate(parts) for row in random_mix(part, Fraction(11, 4), 12 * seed + place)]
             for seed in range(200)]
    assert max(cost(found, mix).max() for mix in mixes) < sorted(cost(found, mix).max() for mix in plain)[10]
    assert all(mean_width(mix) == Fraction(11, 4) for mix in mixes)
    assert scope == "model" or {row.mean() for mix in mixes for row in mix} == {2.75}
    assert len({np.concatenate(mix).tobytes() for mix in mixes}) == len(mixes)  # still drawn, by the seed


def test_a_random_mix_of_whole_layers_keeps_them_whole():
    [widths, again] = [choice.widths_on(job(profile="uniform-layer"), skewed(12), choice.RANDOM)[0] for _ in range(2)]
    assert mean_width(widths) == Fraction(11, 4) and {row.mean() for row in widths} == {2, 3}
    assert all((a == b).all() for a, b in zip(widths, again, strict=True))


def test_a_layer_without_tokens_is_no_obstacle():
    found = skewed(2)
    found = replace(found, routed=(np.zeros(EXPERTS), found.routed[1]), error=(0 * found.error[0], found.error[1]))
    widths, _ = choice.widths_on(job(), found, choice.RANDOM)
    assert mean_width(widths) == Fraction(11, 4) and widths[0].mean() == 2.5  # what costs nothing has the narrow width


def test_one_domain_that_loses_is_enough_and_is_named(chosen):
    both = np.stack([RISING, 5 * RISING], 1)
    turned = np.stack([RISING, 5 * RISING[::-1]], 1)
    found = chosen(measured(both), measured(turned), job())
    assert found.basis == "random" and "code" in choice.reason(found.facts())


@pytest.mark.parametrize("fairness", [0.75, 0])
@pytest.mark.parametrize("turned", [False, True])
def test_a_half_without_text_of_a_domain_is_no_gain_in_it(chosen, turned, fairness):
    """One window of code lies in the second half: the first finds that all widths cost code nothing."""
    both = measured(np.stack([RISING, 5 * RISING[::-1]], 1))
    lacks = replace(both, error=tuple(error * [1.0, 0.0] for error in both.error))
    the_job = job(fairness=fairness)
    found = chosen(*((both, lacks) if turned else (lacks, both)), the_job)
    blind, _ = choice.widths_on(the_job, lacks, choice.EXPERTS)
    paid, average = 0, 0
    for error, widths in zip(both.error, blind, strict=True):
        paid += sum(error[expert, WIDTHS.index(width), 1] for expert, width in enumerate(widths))
        average += error[:, 0, 1].sum() * 0.25 + error[:, 1, 1].sum() * 0.75
    assert found.gains["code"] == pytest.approx(1 - paid / average) and found.gains["code"] < 0
    assert found.one_way == ("code",) and found.basis == "random" and "code (-" in choice.reason(found.facts())


def test_a_domain_that_no_half_can_judge_is_scant(chosen):
    none = measured(RISING)
    none = replace(none, error=tuple(error * [1.0, 0.0] for error in none.error))
    found = chosen(none, none, job())
    assert set(found.gains) == {"prose"} and found.scant == ("code",) and found.basis == "random"


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


def noisy_halves(seed):
    """Two noisy views of costs that differ tenfold between experts and domains."""
    rng = np.random.default_rng(seed)
    true = np.exp(rng.normal(size=(EXPERTS, DOMAINS)))
    return [measured(true * np.exp(rng.normal(size=true.shape))) for _ in range(2)]


def test_more_fairness_is_tried_before_costs_are_given_up(chosen):
    """Of many noisy measurements: as little fairness as leaves no domain worse off, and never less than asked for."""
    seen = set()
    for seed in range(100):
        halves = noisy_halves(seed)
        found = chosen(*halves, job())
        levels = {level: min(choice._held_out_gain(job(), halves, level)[0].values()) for level in (0.5, 0.75, 1.0)}
        enough = [level for level, least in levels.items() if least >= 0]
        assert found.basis == ("experts" if enough else "random") and found.fairness == (enough or [0.5])[0]
        if enough:
            mean = replace(halves[0], error=tuple((a + b) / 2 for a, b in zip(*(h.error for h in halves), strict=True)))
            wanted = choice.widths_on(job(fairness=found.fairness), mean, choice.EXPERTS)[0]
            assert all((a == b).all() for a, b in zip(found.widths, wanted, strict=True))
        assert chosen(*halves, job(fallback=False)).fairness == 0.5 and chosen(*halves, job(fairness=0)).fairness == 0
        seen.add((found.basis, found.fairness))
    assert {("experts", 0.5), ("experts", 0.75), ("random", 0.5)} <= seen


def test_without_fallback_experts_costs_are_followed_with_a_warning(chosen):
    found = chosen(measured(RISING), measured(RISING[::-1]), job(fallback=False))
    assert found.basis == "experts" and "follow it all the same (experts.fallback)" in choice.reason(found.facts())


def test_without_widths_for_a_random_mix_costs_are_followed_with_a_warning(chosen, monkeypatch):
    """Of 1 and 3 bits there is no mix around 2.75: it is not `experts.fallback` that keeps from it."""
    monkeypatch.setattr("test_choice.WIDTHS", (1, 3))
    the_job = job(["prose"], widths=(1, 3))
    monkeypatch.setattr("test_choice.DOMAINS", 1)
    found = chosen(measured(RISING), measured(RISING), the_job)
    assert (found.basis, found.missing, found.gains) == ("experts", ("code",), {})
    assert "follow it all the same (experts.widths lack those of a random mix)" in choice.reason(found.facts())


def test_without_widths_for_a_random_mix_the_allocation_warns_of_that(tiny, tmp_path, monkeypatch):
    """Nothing was said: costs were followed, and compared with nothing, as if held-out text had borne them out."""
    monkeypatch.setattr(choice, "LEAST_TOKENS", 1)
    experts = {"widths": [2, 4], "bits": 3.25, "group": 1}  # the measured ones' costs, by other names
    with resume_job(shutil.copytree(tiny.work, tmp_path / "work")) as job:
        warning = allocate(replace(job, recipe=tiny_recipe(experts=experts)))["warning"]
        assert allocate(job)["warning"] is None
    assert "experts.widths lack 3: there is no random mix of 3.25 bits" in warning


def test_a_set_of_one_domain_is_followed_and_said_to_be_one():
    facts = {"basis": "experts", "gains": {"law": 0.2}, "missing": [], "scant": []}
    assert "one domain, 'law'" in choice.reason(facts)


def test_costs_by_energy_pass_over_experts_that_no_held_out_token_reached():
    whole = measured(RISING)
    starved = measured(np.where(RISING < 3, 0, RISING))
    for found, wanted in zip(starved.costs_by_energy(), whole.costs_by_energy(), strict=True):
        assert np.array_equal(found[2:], wanted[2:]) and not found[:2].any()
    assert not any(layer.any() for layer in measured(0 * RISING).costs_by_energy()), "a layer of zeros"
