"""A budget in bytes, against what a plan counts class by class."""

import re

import pytest
from builders import TINY_CONFIG
from small import small_recipe, small_source

from keys35.errors import BudgetError
from keys35.glm.config import GlmConfig
from keys35.glm.names import census
from keys35.recipe import Output
from keys35.stages.budget import trades
from keys35.stages.job import open_job, resume_job
from keys35.stages.plan import plan
from keys35.stages.profile import profile_rules


def recipe_with(bits, **experts):
    return small_recipe(experts={"widths": [2, 3, 4], "bits": bits, "group": 2, "fallback": False} | experts)


def test_a_size_takes_the_largest_mean_that_fits(source):
    exact = plan(source, recipe_with(2.75)).output_bytes
    step = plan(source, recipe_with(3)).output_bytes - exact  # one expert of four a bit wider
    for size, mean in [(exact, 2.75), (exact - 1, 2.5), (exact + step - 1, 2.75), (exact + step, 3), (10**12, 4)]:
        found = plan(source, recipe_with(f"{size / 1e9:.9f} GB"))
        assert found.mean_bits == mean and found.output_bytes <= max(size, exact)
    found = plan(source, recipe_with(f"{exact / 2**30:.12f} GiB"))
    assert abs(found.output_bytes - exact) in (0, step)


def test_a_size_takes_the_largest_mean_that_its_widths_can_have(source):
    """Of four experts at 2 or 4 bits no sum is odd: 2.75 fits, 2.5 there is; it was refused, and asked for a mean."""
    sizes = {bits: plan(source, recipe_with(bits)).output_bytes / 1e9 for bits in (2, 2.25, 2.75, 3.75)}
    for bits, mean in [(2, 2), (2.25, 2), (2.75, 2.5), (3.75, 3.5)]:
        assert plan(source, recipe_with(f"{sizes[bits]:.9f} GB", widths=[2, 4])).mean_bits == mean


def test_a_size_for_more_than_the_widest_half_rate_is_a_whole_sum(tmp_path):
    """Three experts at 3.5 bits have 10.5 together."""
    recipe = recipe_with("9 GB", widths=[3, 3.5])
    assert plan(small_source(tmp_path, experts=3), recipe).mean_bits == 10 / 3


def test_a_size_that_does_not_hold_the_least_width_is_refused_with_one_that_does(source):
    with pytest.raises(BudgetError, match="ask for more") as refusal:
        plan(source, recipe_with("0.001 GB"))
    enough = float(re.search(r"([\d.]+) GB: ask", str(refusal.value))[1])
    assert plan(source, recipe_with(f"{enough + 0.001:.3f} GB")).mean_bits >= 2
    for wrong in ("276.1GB", "a lot", "-1 GB", "3 TB"):
        with pytest.raises(ValueError, match="bits must be"):
            recipe_with(wrong)


def test_no_trade_has_a_width_for_what_is_not_encoded():
    """Where dense linears stay BF16 the plan said "with dense 5"."""
    recipe = recipe_with(2.75).model_copy(update={"output": Output(profile="bf16-rest")})
    rules = profile_rules(census(GlmConfig.from_dict(TINY_CONFIG)), "bf16-rest").values()
    found = trades(rules, recipe, {rule.source: 2 * rule.numel for rule in rules})
    assert {trade.dense for trade in found} == {16}


def test_trades_are_of_the_same_size(source):
    found = plan(source, recipe_with(2.75))
    others = [trade for trade in found.trades if (trade.dense, trade.mtp) != (5, 4)]
    assert others and next(t.mean for t in found.trades if (t.dense, t.mtp) == (5, 4)) == 2.75
    routed = next(c.params for c in found.classes if c.name == "routed experts")
    for trade in others:
        same = plan(source, recipe_with(3).model_copy(update={
            "dense": found_width(small_recipe().dense, trade.dense), "mtp": found_width(small_recipe().mtp, trade.mtp)
        }))  # fmt: skip
        assert same.output_bytes + (trade.mean - 3) * routed / 8 == pytest.approx(found.output_bytes, abs=2)


def found_width(section, bits):
    return section.model_copy(update={"bits": bits})


def test_a_job_keeps_the_mean_it_began_with(source, tmp_path):
    size = plan(source, recipe_with(2.5)).output_bytes
    recipe = recipe_with(f"{size / 1e9:.9f} GB")
    with open_job(source, recipe, tmp_path / "work") as job:
        assert job.recipe.experts.budget == 2.5
    with open_job(source, recipe, tmp_path / "work"), pytest.raises(ValueError):
        _ = recipe.experts.budget
    with resume_job(tmp_path / "work") as job:
        assert job.recipe.experts.bits == "5/2"
