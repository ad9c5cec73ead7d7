"""The extrapolation from one measured layer, against sums by hand, and the figures that are shipped."""

import json
from pathlib import Path

import pytest

from keys35.bench.standin import GLM_5_3
from keys35.glm.config import GlmConfig
from keys35.recipe import load_recipe
from keys35.stages.projection import MEASURED, project, projected

SHIPPED = Path(__file__).parents[2] / "reports/benchmarks" / MEASURED
LAYER = {
    "seconds": {"reading": 8.0, "forward": 10.0, "Hessians": 6.0, "encode": 300.0, "judging": 4.0, "writing": 2.0},
    "layer_seconds": 340.0, "encode_mws_a_width": 100.0, "tokens": {"fit": 100 * 2048, "selection": 24 * 2048},
}  # fmt: skip


def test_glm_from_a_layer_by_hand() -> None:
    config, recipe = GlmConfig.from_dict(GLM_5_3), load_recipe("glm-5.3-2.75bpw")
    found = project(LAYER, config, recipe)
    expert = 3 * 6144 * 2048 * 256
    experts = (75 * 3 + 1) * expert / 100e6 / 3600
    assert experts < found.encode_hours < 1.05 * experts, "dense linears are a few per cent of it"
    forward = 79 * 10.0 * (224 + 48) / (100 + 24)
    other = 79 * (6.0 * 2.24 + 4.0 * 2 + 340.0 - 300.0 - 10.0 - 6.0 - 4.0)
    assert found.other_hours * 3600 == pytest.approx(forward + other)
    copies = 78 + sum(78 - layer for layer in range(3, 78))
    assert found.sensitivity_hours * 3600 == pytest.approx(copies * 10.0 / 124 * 16)
    assert found.wall_hours[1] == pytest.approx(found.gpu_hours)
    assert found.wall_hours[8] == pytest.approx((found.gpu_hours * 3600 - forward) / 8 / 3600)
    assert found.read_gb > 2 * 1480 and "GPU-hours" in found.text()


def test_what_is_shipped_was_extrapolated_by_this_code() -> None:
    config, recipe = GlmConfig.from_dict(GLM_5_3), load_recipe("glm-5.3-2.75bpw")
    assert json.loads(SHIPPED.read_text())["projection"] == projected(config, recipe).facts()
