"""The whole job on a GPU: it repeats to the last bit, and measures what the CPU measures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small import digest, small_recipe

from keys35.progress import Progress
from keys35.stages import needs, room
from keys35.stages.capture import calibration_windows
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.pipeline import run
from keys35.stages.prefix import encode_behind_prefix
from keys35.stages.streams import Handed
from keys35.stages.units import dense_unit, expert_units

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def finish(source: Path, root: Path) -> tuple[dict[str, str], dict]:
    with open_job(source, small_recipe(), root / "work") as job:
        assert job.device.type == "cuda" and job.store.device.type == "cuda"
        result = run(job, root / "out", Progress(job.work), tp=1)
    return digest(root / "out"), result


def test_two_runs_on_a_gpu_write_the_same_bytes_and_a_cpu_judges_them_alike(source, tmp_path) -> None:
    (first, result), (second, _) = (finish(source, tmp_path / name) for name in ("first", "second"))
    made = {name for name in first if name.endswith((".safetensors", ".json")) and "MAKING" not in name}
    assert {name: first[name] for name in made} == {name: second[name] for name in made}
    command = ["-m", "keys35.cli", "--json", "validate", tmp_path / "first" / "out", "--reference", source, "--tp", "1"]
    judged = subprocess.run([sys.executable, *command], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True,
                            stdout=subprocess.PIPE, text=True)  # fmt: skip
    cpu = json.loads(judged.stdout)["metrics"]
    for name in ("kl", "ppl", "top1"):
        assert result["validation"]["metrics"][name] == pytest.approx(cpu[name], rel=0.02)


def test_errors_on_a_gpu_are_those_on_the_cpu(source, tmp_path) -> None:
    """Of weights and at the output; no KL is compared, since which of so few experts is dearest is chance."""
    found = []
    for backend in ("cuda", "cpu"):
        recipe = small_recipe(encoder={"backend": backend, "prefix": "source"})
        with open_job(source, recipe, tmp_path / backend) as job:
            measure(job, Progress())
            units = [job.work.require(unit.name)["data"] for layer in job.config.moe_layers
                     for unit in expert_units(job, layer)]
            found.append([sum((np.ravel(unit[key]).tolist() for unit in units), []) for key in ("error", "energy")]
                         + [[np.mean(unit["proxy_error"][width]) for unit in units for width in unit["proxy_error"]]])
    for ours, theirs in zip(*found, strict=True):
        assert np.sum(ours) == pytest.approx(np.sum(theirs), rel=0.03)
    assert found[0][2] == pytest.approx(found[1][2], rel=0.03)


def behind_prefix(source: Path, root: Path, backend: str) -> tuple[dict[str, str], list[float]]:
    """The first layers of a job behind the quantized prefix, all of it on a GPU; files, and proxy errors of layer 0."""
    recipe = small_recipe(encoder={"prefix": "quantized", "backend": backend})
    with open_job(source, recipe, root / "work") as job:
        if backend == "cpu":
            encode_behind_prefix(job, 0, calibration_windows(job)["fit"], {}, Handed())()
        else:
            run(job, root / "out", Progress(job.work), tp=1)
        errors = job.work.require(dense_unit(0))["data"]["proxy_error"]
    return digest(root / "out"), [errors[name] for name in sorted(errors)]


def test_a_quantized_prefix_repeats_on_a_gpu_and_encodes_as_on_the_cpu(source, tmp_path) -> None:
    (first, ours), (second, _) = (behind_prefix(source, tmp_path / name, "cuda") for name in ("first", "second"))
    made = {name for name in first if name.endswith((".safetensors", ".json")) and "MAKING" not in name}
    assert made and {name: first[name] for name in made} == {name: second[name] for name in made}
    _, theirs = behind_prefix(source, tmp_path / "cpu", "cpu")
    # inputs rounded as a GPU's short products round them move so small a linear's own error by 3 % either way
    assert ours == pytest.approx(theirs, rel=0.12) and sum(ours) == pytest.approx(sum(theirs), rel=0.03)


def test_a_gpu_without_room_for_states_and_rows_makes_the_same_bytes(source, tmp_path, monkeypatch) -> None:
    """They are kept on the host then, and pass through pinned memory."""
    roomy, _ = behind_prefix(source, tmp_path / "roomy", "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(room, "_memory", lambda job: 0)
        patch.setattr(needs, "ROWS_ON_DEVICE", 0)
        small, _ = behind_prefix(source, tmp_path / "small", "cuda")
    made = {name for name in roomy if name.endswith((".safetensors", ".json")) and "MAKING" not in name}
    assert made and {name: roomy[name] for name in made} == {name: small[name] for name in made}
