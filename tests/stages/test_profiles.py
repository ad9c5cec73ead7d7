"""The three profiles on a small trained model: made, checked for their engines, loaded by the ranks."""

import json
import shutil
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from safetensors import safe_open
from small import small_recipe, small_source

from keys35.errors import BudgetError, RecipeError
from keys35.files.source import ShardedSource
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.stages.allocate import ALLOCATION
from keys35.stages.check import Engine, check
from keys35.stages.job import open_job
from keys35.stages.pipeline import run
from keys35.stages.plan import plan

LAYERS = 3  # one dense, two with experts, so that whole layers can differ


def lean(profile: str, bits: float | str = 2.5):
    """Few windows: these tests look at what is written, not at how good it is."""
    return small_recipe(
        experts={"widths": [2, 3], "bits": bits, "group": 2},
        calibration={"set": "demo", "window": 96, "fit_windows": 4, "selection_windows": 4, "sensitivity_windows": 2},
        output={"shards": 4, "profile": profile},
        panel={"set": "demo-panel", "window": 192, "windows": 2, "random_mixes": 1},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_source(tmp_path_factory.mktemp("profiles") / "source", layers=LAYERS, experts=2)


@pytest.fixture(scope="module", params=["uniform-layer", "bf16-rest"])
def made(request, model, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    recipe = lean(request.param)
    with open_job(model, recipe, root / "work") as job:
        result = run(job, root / "out", Progress(), tp=2)
    return request.param, recipe, root, result


def widths_by_layer(out):
    """Straight from the trellis shapes, with the stock library."""
    found = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as handle:
            for name in handle.keys():
                if name.endswith(".trellis") and ".mlp.experts." in name:
                    layer = int(name.split(".")[2])
                    found.setdefault(layer, []).append(handle.get_slice(name).get_shape()[-1] / 16)
    return found


def test_keeps_the_contract(made, model):
    profile, recipe, root, _ = made
    report = check(root / "out", model, deep=True, expected=recipe, sample=20)
    assert report.ok, report.findings
    assert report.routed_mean == Fraction(5, 2)
    config = json.loads((root / "out" / "config.json").read_text())["quantization_config"]
    assert config["profile"] == profile


def test_the_engines_it_is_for(made, model):
    profile, _, root, _ = made
    passed = {engine for engine in Engine if check(root / "out", model, engine=engine).ok}
    if profile == "uniform-layer":
        assert passed == set(Engine)
    else:  # mixed layers and plain dense linears
        assert Engine.ALL in passed and not {Engine.VLLM_EXL3, Engine.TENSORFOLD} & passed


def test_widths(made):
    profile, _, root, _ = made
    found = widths_by_layer(root / "out")
    assert sum(found[1] + found[2]) / len(found[1] + found[2]) == 2.5
    if profile == "uniform-layer":
        assert {frozenset(found[1]), frozenset(found[2])} == {frozenset([2]), frozenset([3])}


def test_dense_linears(made, model):
    profile, _, root, _ = made
    out, source = ShardedSource.open(root / "out"), ShardedSource.open(model)
    name = "model.layers.0.self_attn.q_a_proj"
    plain = profile == "bf16-rest"
    assert (f"{name}.weight" in out.tensors, f"{name}.trellis" in out.tensors) == (plain, not plain)
    if plain:
        assert torch.equal(out.read(f"{name}.weight"), source.read(f"{name}.weight"))


def test_ranks_load_it(made):
    *_, result = made
    against = result["validation"]["tp_against_one"]
    assert against["max_logit_difference"] <= 1e-3 and result["validation"]["metrics"]["kl"] > 0
    assert result["validation"]["metrics"]["kl"] == pytest.approx(result["baselines"]["allocation"]["kl"], rel=1e-4)


def test_page_and_card_take_it(made, tmp_path):
    _, _, root, _ = made
    copy = tmp_path / "out"
    shutil.copytree(root / "out", copy)
    done = subprocess.run([sys.executable, "-m", "keys35.cli", "report", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_plan_predicts_its_bytes(made, model):
    profile, recipe, root, _ = made
    found = plan(model, recipe)
    assert found.output_bytes == ShardedSource.open(root / "out").total_size
    costs = {cost.name: cost for cost in found.profiles}
    assert costs[profile].output_bytes == found.output_bytes and costs[profile].rank_bytes == found.rank_bytes
    assert costs["per-expert"].output_bytes < costs["bf16-rest"].output_bytes


def test_uniform_layers_are_compared_with_shuffled_layers(made):
    profile, _, root, _ = made
    sets = json.loads((root / "work" / ALLOCATION).read_text())["sets"]
    if profile == "uniform-layer":
        for name in ("allocation", "random-0", "error-only"):
            assert all(len(set(layer)) == 1 for layer in sets[name]["widths"]), name
        assert sets["per-expert"]["predicted_kl"] <= sets["allocation"]["predicted_kl"]
    else:
        assert "equal-per-layer" in sets and "per-expert" not in sets


def test_a_mean_that_whole_layers_cannot_have_names_the_nearest(model):
    with pytest.raises(BudgetError, match=r'(?s)2 layers of one width.*"5/2" \(2.5\) and "6/2" \(3\)'):
        plan(model, lean("uniform-layer", 2.75))


def test_a_fraction_is_a_budget(model):
    recipe = lean("uniform-layer", "5/2")
    assert recipe.experts.budget == Fraction(5, 2) and plan(model, recipe).output_bytes > 0
    costs = {cost.name: cost.mean_bits for cost in plan(model, lean("per-expert", 2.75)).profiles}
    assert costs == {"per-expert": Fraction(11, 4), "uniform-layer": Fraction(5, 2), "bf16-rest": Fraction(11, 4)}


def test_impossible_combinations_are_refused(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("name = 'x'\n[experts]\nscope = 'layer'\n[output]\nprofile = 'uniform-layer'\n")
    with pytest.raises(RecipeError, match="needs experts.scope"):
        load_recipe(path)
    path.write_text("name = 'x'\n[experts]\nbits = 'three'\n")
    with pytest.raises(RecipeError, match="experts.bits: bits must be a number, a fraction"):
        load_recipe(path)
