"""The extrapolation from one measured layer, against sums by hand, and the figures that are shipped."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from keys35.bench.real_layer import measured_like
from keys35.bench.standin import GLM_5_3
from keys35.glm.config import GlmConfig
from keys35.recipe import load_recipe
from keys35.stages.needs import device_bytes, host_bytes, largest_rows, rows_bytes, rows_stay
from keys35.stages.projection import MEASURED, project, projected

SHIPPED = Path(__file__).parents[2] / "reports/benchmarks" / MEASURED
LAYER = {
    "seconds": {"reading": 8.0, "forward": 10.0, "Hessians": 6.0, "encode": 300.0, "judging": 4.0, "writing": 2.0},
    "layer_seconds": 340.0, "encode_mws_a_width": 100.0, "tokens": {"fit": 100 * 2048, "selection": 24 * 2048},
}  # fmt: skip
BEHIND = {
    "tokens": {"fit": 64 * 2048, "selection": 24 * 2048, "measured on": 16 * 2048}, "onward_seconds": 24.0,
    "encode_mws_a_width": 90.0,
    "measuring": {"reading": 4.0, "forward": 5.0, "Hessians": 3.0, "encode": 2.0, "judging": 1.5, "all": 30.0},
    "behind_prefix": {
        "dense": {"forward": 7.0, "writing": 3.0, "saving": 5.0, "Hessians": 2.0},
        "experts": {"Hessians": 50.0, "reading": 5.0, "writing": 1.0},
    },
}  # fmt: skip


def test_glm_from_a_layer_by_hand() -> None:
    config, recipe = GlmConfig.from_dict(GLM_5_3), measured_like(load_recipe("glm-5.3-2.75bpw"))
    found = project(LAYER, config, recipe)
    expert = 3 * 6144 * 2048 * 256
    experts = (75 * 3 + 1) * expert / 100e6 / 3600
    assert experts < found.encode_hours < 1.05 * experts, "dense linears are a few per cent of it"
    forward = 79 * 10.0 * (224 + 48) / (100 + 24)
    other = 79 * (6.0 * 2.24 + 4.0 * 2 + 340.0 - 300.0 - 10.0 - 6.0 - 4.0)
    assert found.other_hours * 3600 == pytest.approx(forward + other)
    copies = 78 + 75 + sum(78 - layer for layer in range(3, 78))
    assert found.sensitivity_hours * 3600 == pytest.approx(copies * 10.0 / 124 * 16)
    assert found.wall_hours[1] == pytest.approx(found.gpu_hours)
    assert found.wall_hours[8] == pytest.approx((found.gpu_hours * 3600 - forward) / 8 / 3600)
    assert found.read_gb > 2 * 1480 and "GPU-hours" in found.text()


def test_a_predicted_measurement_by_hand() -> None:
    config, recipe = GlmConfig.from_dict(GLM_5_3), measured_like(load_recipe("glm-5.3-2.75bpw"))
    predicted = recipe.model_copy(update={"experts": recipe.experts.model_copy(update={"measure": "predicted"})})
    sample = recipe.experts.sample
    plain, layer = project(LAYER, config, recipe), LAYER | {"predicted_run": {"seconds": {"simulation": 16.0}}}
    found = project(layer, config, predicted)
    experts = 75 * (3 - 3 / sample - 1) * 3 * 6144 * 2048 * 256
    assert plain.encode_hours - found.encode_hours == pytest.approx(experts / 100e6 / 3600), "a sample, and all once"
    again = 79 * (16.0 + 8.0 + 10.0 * (224 + 48) / (100 + 24))
    assert (found.other_hours - plain.other_hours) * 3600 == pytest.approx(again)
    weights = 75 * 3 * 6144 * 2048 * 256
    assert found.read_gb - plain.read_gb == pytest.approx(1506.66 + 2 * weights / 1e9, rel=0.01)
    assert found.written_gb - plain.written_gb == pytest.approx(weights / 8e9 * (9 / sample + 2.75 - 9), rel=0.01)


def quantized(recipe):
    return recipe.model_copy(update={"encoder": recipe.encoder.model_copy(update={"prefix": "quantized"})})


def test_a_quantized_prefix_by_hand() -> None:
    """Its passes, sums and solves, each from GLM-5.3's sizes as they are written here."""
    config, recipe = GlmConfig.from_dict(GLM_5_3), measured_like(load_recipe("glm-5.3-2.75bpw"))
    plain = project(LAYER, config, recipe)
    behind = BEHIND
    found = project(LAYER, config, quantized(recipe), behind)
    experts = 75 * 3 * 6144 * 2048 * 256
    assert found.encode_hours - plain.encode_hours == pytest.approx(experts / 100e6 / 3600), "the chosen width again"
    assert found.sensitivity_hours == plain.sensitivity_hours and found.other_hours == plain.other_hours

    dense = 79 * (3.5 * (7.0 + 3.0) + 2.0)
    onward = 79 * (3.5 * (24.0 - 4.0) + 4.0)
    experts = 76 * (3.5 * 50.0 + 5.0 + 1.0)
    assert found.prefix_hours * 3600 == pytest.approx(dense + onward + experts)
    assert found.gpu_hours == pytest.approx(found.encode_hours + found.sensitivity_hours + found.other_hours
                                            + found.prefix_hours)
    assert found.wall_hours[1] == pytest.approx(found.gpu_hours)
    assert found.wall_hours[8] > plain.wall_hours[8] + (found.gpu_hours - plain.gpu_hours) / 8, "layers wait in order"
    behind = deepcopy(BEHIND)
    behind["behind_prefix"]["dense"]["saving"] = 3.0  # nothing of it beside other work
    sooner = project(LAYER, config, quantized(recipe), behind)
    assert sooner.wall_hours[1] == found.wall_hours[1]
    assert (found.wall_hours[8] - sooner.wall_hours[8]) * 3600 == pytest.approx(76 * 3.5 * 2.0), "others wait for rows"
    assert found.read_gb > plain.read_gb + 1.95 * 1480 and found.written_gb > plain.written_gb
    assert "the quantized prefix" in found.text() and found.facts()["prefix_hours"] > 0
    assert "prefix_hours" not in plain.facts() and len(plain.facts()["assumptions"]) < len(found.facts()["assumptions"])


def test_a_prefix_with_predicted_costs_by_hand() -> None:
    """What measures is what that layer took, of which the Hessians grow with the windows that are simulated on."""
    config, recipe = GlmConfig.from_dict(GLM_5_3), load_recipe("glm-5.3-2.75bpw")
    encoded = recipe.model_copy(update={"experts": recipe.experts.model_copy(update={"measure": "encoded"})})
    found, other = project(LAYER, config, recipe, BEHIND), project(LAYER, config, encoded, BEHIND)
    fixed = 30.0 - 5.0 - 3.0 - 2.0 - 1.5
    forward, grows = 5.0 * (224 + 48) / (64 + 24), 3.0 * 56 / 16 + 1.5 * 48 / 24
    assert found.other_hours * 3600 == pytest.approx(79 * (forward + grows + fixed))
    assert found.prefix_hours == other.prefix_hours and found.sensitivity_hours == other.sensitivity_hours
    experts = 75 * 3 * 6144 * 2048 * 256 * (1 + 3 / recipe.experts.sample)
    assert experts / 90e6 / 3600 < found.encode_hours < 1.1 * experts / 90e6 / 3600 < other.encode_hours / 3
    assert found.wall_hours[1] == pytest.approx(found.gpu_hours)


def test_a_quantized_prefix_needs_its_memory() -> None:
    """A layer of 19.3 GB on its way is more than a correction of o_proj: it has no experts beside it."""
    config, recipe = GlmConfig.from_dict(GLM_5_3), measured_like(load_recipe("glm-5.3-2.75bpw"))
    found = device_bytes(config, quantized(recipe))
    assert found == device_bytes(config, recipe) > 256 * 3 * 6144 * 2048 * 2
    wide = replace(config, n_routed_experts=8, num_attention_heads=128)
    assert device_bytes(wide, quantized(recipe)) > max(8 * 4 * 32768**2, device_bytes(wide, recipe))
    assert host_bytes(10**9, config, quantized(recipe)) >= host_bytes(10**9, config, recipe)


def test_a_large_gpu_keeps_a_layers_rows() -> None:
    """Beside a driver's pass and an encoder; any GPU keeps what under 24 GiB leave room for."""
    config, recipe = GlmConfig.from_dict(GLM_5_3), measured_like(load_recipe("glm-5.3-2.75bpw"))
    plain, behind = largest_rows(config, recipe), largest_rows(config, quantized(recipe))
    assert plain == rows_bytes(config, recipe) and 2.4 * plain < behind < 2.6 * plain
    for memory, stays in ((0, ()), (24 << 30, ()), (56 << 30, (plain,)), (141 << 30, (plain, behind))):
        assert [rows_stay(size, recipe, memory) for size in (plain, behind)] == [s in stays for s in (plain, behind)]
    assert rows_stay(4 << 30, recipe) and not rows_stay((4 << 30) + 1, recipe)
    low = recipe.model_copy(update={"encoder": recipe.encoder.model_copy(update={"low_memory": True})})
    assert largest_rows(config, low) == 0 and not rows_stay(1, low, 141 << 30)


def test_what_is_shipped_was_extrapolated_by_this_code() -> None:
    config, recipe = GlmConfig.from_dict(GLM_5_3), measured_like(load_recipe("glm-5.3-2.75bpw"))
    assert json.loads(SHIPPED.read_text())["projection"] == projected(config, recipe).facts()
