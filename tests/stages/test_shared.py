"""A shared expert's down projection, encoded behind its layer's experts: what it makes up for, and that it is kept."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import tiny_recipe

from keys35.files.atomic import load_tensors
from keys35.glm.block import LayerWeights
from keys35.glm.layer import behind_attention, behind_mlp
from keys35.glm.weights import Overlay
from keys35.progress import Progress
from keys35.stages.allocate import allocate, load_allocation
from keys35.stages.assemble import assemble
from keys35.stages.candidates import MixStore
from keys35.stages.capture import calibration_windows, layer_weights
from keys35.stages.dense import dense_weight
from keys35.stages.job import Job, open_job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.shared import _sums
from keys35.stages.states import States
from keys35.stages.streams import QUANTIZED, SOURCE, states_before, through
from keys35.stages.units import dense_file, dense_home, encoded_last
from keys35.stages.workers import Workers

RECIPE = tiny_recipe(encoder={"prefix": "quantized"})
LAYER = 2


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    with open_job(tiny.source, RECIPE, root / "work") as job:
        measure(job, Progress())
        allocate(job)
        quantize(job, Progress(), Workers(1))
        assemble(job, root / "out", Progress())
    return root


def test_it_is_fitted_to_what_the_whole_layer_lacks(tiny, made: Path, tmp_path: Path) -> None:
    """Against the difference of two whole passes, one with its weight as the source has it; in float64."""
    shutil.copytree(made / "work", tmp_path / "work")
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        rule, allocation = encoded_last(job, LAYER), load_allocation(job)
        before = states_before(job, LAYER, calibration_windows(job)["fit"], allocation)
        source = whole_layer(job, before[SOURCE], SOURCE, layer_weights(job, job.store, LAYER))
        lossy, weight = MixStore(job, allocation, final=True, first=True).layer(LAYER), dense_weight(job, rule)
        copy = replace(before[QUANTIZED], x=before[QUANTIZED].x.clone())
        attended = through(job, LAYER, copy, QUANTIZED, lossy, behind_attention)
        sums = _sums(job, LAYER, source, attended, lossy, weight)
        inputs: list[torch.Tensor] = []

        def down(rows: torch.Tensor) -> torch.Tensor:
            inputs.append(rows)
            return rows @ weight

        watched = Overlay(lossy, {rule.module.split(".", 3)[3]: _Called(down)})
        found = whole_layer(job, before[QUANTIZED], QUANTIZED, watched)
    wanted, state = (states.x.flatten(0, 1).double() for states in (source, found))
    size = wanted.square().mean(-1, keepdim=True) + job.config.rms_norm_eps
    match = torch.cat(inputs).double().T @ ((wanted - state) / size)
    assert sums.rows == len(wanted) > 0 and float(match.norm()) > 0
    got = sum(half.match(weight) for half in sums._sums).double()
    assert (got - match).norm() < 1e-3 * match.norm()


def whole_layer(job: Job, states: States, stream: str, weights: LayerWeights) -> States:
    for half in (behind_attention, behind_mlp):
        states = through(job, LAYER, states, stream, weights, half)
    return states


class _Called:
    """A function in a matrix's place."""

    def __init__(self, act) -> None:
        self._act = act

    def __rmatmul__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._act(rows)


def test_the_checkpoint_has_the_later_one(tiny, made: Path) -> None:
    with open_job(tiny.source, RECIPE, made / "work") as job:
        assert encoded_last(job, 0) is None, "a dense layer has no shared expert"
        assert encoded_last(job, 3) is None, "an MTP layer passes its state to nobody"
        for layer in (1, 2):
            name = f"{encoded_last(job, layer).module}.trellis"
            first, last = (load_tensors(path)[name] for path in (
                dense_file(job, layer), dense_home(job, encoded_last(job, layer))[1]))
            [kept] = [shard.get_tensor(name) for shard in _shards(made / "out") if name in shard.keys()]
            assert torch.equal(kept, last) and not torch.equal(kept, first)


def _shards(out: Path):
    return [safe_open(path, "pt") for path in sorted(out.glob("*.safetensors"))]
