"""Recipes: what ships is legal, what is wrong is named with its key and value."""

import json
from fractions import Fraction

import pytest

from keys35.calibration.text import load_text_set
from keys35.errors import ContractError, RecipeError, ResumeError
from keys35.files.ledger import WHEREABOUTS
from keys35.recipe import load_recipe, resource_dir, shipped_recipes
from keys35.report.facts import REPORT
from keys35.stages.job import resume_job
from keys35.stages.validate import recipe_of


def test_shipped_recipes_load():
    names = sorted(p.stem for p in resource_dir("recipes", "recipes").glob("*.toml"))
    assert names == ["demo", "glm-5.3-2.75bpw"]
    for name in names:
        recipe = load_recipe(name)
        load_text_set(recipe.calibration.set)
        load_text_set(recipe.panel.set)


def test_the_target_recipe_is_the_target():
    recipe = load_recipe("glm-5.3-2.75bpw")
    assert recipe.experts.widths == (2, 3, 4) and recipe.experts.budget == Fraction(11, 4)
    assert (recipe.dense.bits, recipe.mtp.bits, recipe.output.shards) == (5, 8, 81)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name = 'x'\n[experts]\nwidths = [2, 9]", "experts.widths.*2, 9"),
        ("name = 'x'\n[experts]\nbits = 5.0", "experts.*5.0 lies outside"),
        ("name = 'x'\n[experts]\nwidth = [2]", "experts.width: unknown key"),
        ("name = 'x'\n[encoder]\nbackend = 'gpu'", "encoder.backend.*'gpu'"),
        ("name = 'x'\n[calibration]\nselection_windows = 1", "sensitivity_windows cannot exceed"),
        ("name = 'x'\n[panel]\nrandom_mixes = 10000", "panel.random_mixes.*less than or equal to 100.*10000"),
        ("name = '../x'", "name"),
        ("[experts]", "name"),
        ("name = ", "not valid TOML"),
        (f"name = 'x'\nseed = {'9' * 5000}", "not valid TOML"),
        (f"name = 'x'\n[panel]\nwindows = {'9' * 400}", "panel.windows is an integer of more than 64 bits"),
    ],
)
def test_mistakes_are_named(tmp_path, text, named):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=f"(?s){named}"):
        load_recipe(path)


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    (tmp_path / "demo.toml").write_bytes(b"\xef\xbb\xbf" + shipped_recipes()["demo"].read_bytes())
    assert load_recipe(tmp_path / "demo.toml") == load_recipe("demo")


def test_a_missing_recipe_lists_what_ships():
    with pytest.raises(RecipeError, match="demo, glm-5.3-2.75bpw"):
        load_recipe("no-such")


def test_the_panel_judges_and_does_not_shape():
    recipe = load_recipe("demo")
    other = recipe.model_copy(update={"panel": recipe.panel.model_copy(update={"windows": 2})})
    assert other.guarded() == recipe.guarded() and other.digest() != recipe.digest()


def test_a_recipe_of_another_version_is_refused_where_it_is_kept(tmp_path):
    """A job or a checkpoint that a later version made: no traceback, and the key that is not known here."""
    stored = load_recipe("demo").model_dump(mode="json")
    stored["encoder"]["patience"] = 3
    (tmp_path / WHEREABOUTS).write_text(json.dumps({"source": "elsewhere", "recipe": stored}))
    (tmp_path / REPORT).write_text(json.dumps({"recipe": stored}))
    with pytest.raises(ResumeError, match=r"whereabouts.json keeps a recipe.*\(encoder.patience\)"):
        with resume_job(tmp_path):
            pass
    with pytest.raises(ContractError, match=r"REPORT.json keeps a recipe.*\(encoder.patience\)"):
        recipe_of(tmp_path)
    (tmp_path / REPORT).write_text("{}")
    with pytest.raises(ContractError, match="the whole"):
        recipe_of(tmp_path)
