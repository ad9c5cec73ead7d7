"""The scripts beside the ablations' tables: they read variants as `keys35 ablate` does, and run."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tiny import tiny_recipe

from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.stages.ablate import ablate, work_folder
from keys35.stages.variants import Variant, load_variants

SCRIPTS = Path(__file__).parents[2] / "reports" / "ablations"


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("recipe", "texts"), [("demo", 2), (str(SCRIPTS / "skewed.toml"), 4)])
def test_processes_share_out_every_variant_that_a_model_has_text_for(recipe, texts):
    """A list's base was left out, without which plain LDLQ is no recipe, and nothing ran."""
    lists = [None, SCRIPTS / "more-variants.toml"]
    groups = script("several").tasks_of("model", recipe, Path("work"), lists)
    found = [variant for *_, variants in groups for variant in variants]
    everyone = [variant for path in lists for variant in load_variants(path)]
    known = {domain for v in everyone for domain in v.of(load_recipe(recipe)).calibration.domains}
    assert len(known) == 4 and len(found) == len({(v.group, v.name) for v in found})
    missing = [v.name for v in everyone if v not in found]
    assert missing == ([] if texts == 4 else ["without code", "without prose"])
    folders = [{work_folder(v.of(load_recipe(recipe)), load_recipe(recipe)) for v in group}
               for *_, group in groups]
    assert all(len(folder) == 1 for folder in folders) and len(set.union(*folders)) == len(groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bound", "mix_spread"])
def test_what_experts_cost_alone_says_of_mixes(tiny, tmp_path, monkeypatch, name):
    recipe = tiny_recipe(experts={"widths": [2, 3, 4], "bits": 2.75, "group": 4, "fallback": False},
                         encoder={"prefix": "source"})
    monkeypatch.setattr("keys35.stages.variants.load_variants", lambda *_: [Variant("A", "d", {}, ("allocation",))])
    module, out = script(name), tmp_path / "out.json"
    monkeypatch.setattr(module, "load_recipe", lambda _: recipe)
    ablate(tiny.source, recipe, module.load_variants(None), tmp_path / "w", Progress())
    names = ["d"] if name == "mix_spread" else []
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "w"), str(tiny.source), "tiny", str(out), *names])
    module.main()
    found = json.loads(out.read_text())
    if name == "bound":
        assert set(found["means"]) == {"9/4", "5/2", "11/4"} and len(found["kl"]) == 1 + 2 * 8
        gains = found["means"]["11/4"]["gain"]
        assert gains["possible"][0] >= gains["predicted costs"][0] - 1e-9
    else:
        ways = found["variants"]["d"]["ways"]
        assert set(ways) == {"random", "cheapest", "fallback"} and len(ways["random"]["mean"]) == 2
