"""The whole job on a GPU: it repeats to the last bit, and measures what the CPU measures."""

import json
from pathlib import Path

import pytest
import torch
from small import digest, small_recipe

from keys35.progress import Progress
from keys35.stages.capture import calibration_windows
from keys35.stages.job import open_job
from keys35.stages.pipeline import run
from keys35.stages.prefix import encode_behind_prefix
from keys35.stages.units import dense_unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def finish(source: Path, root: Path) -> tuple[dict[str, str], dict]:
    with open_job(source, small_recipe(), root / "work") as job:
        assert job.device.type == "cuda" and job.store.device.type == "cuda"
        result = run(job, root / "out", Progress(job.work), tp=1)
    return digest(root / "out"), result


def test_two_runs_on_a_gpu_write_the_same_bytes_and_judge_as_the_cpu_does(source, tmp_path) -> None:
    (first, result), (second, _) = (finish(source, tmp_path / name) for name in ("first", "second"))
    made = {name for name in first if name.endswith((".safetensors", ".json")) and "MAKING" not in name}
    assert {name: first[name] for name in made} == {name: second[name] for name in made}
    with open_job(source, small_recipe(encoder={"backend": "cpu"}), tmp_path / "cpu" / "work") as job:
        assert job.device.type == "cpu"
        cpu = run(job, tmp_path / "cpu" / "out", Progress(job.work), tp=1)
    for name in ("kl", "ppl", "top1"):
        assert result["validation"]["metrics"][name] == pytest.approx(cpu["validation"]["metrics"][name], rel=0.05)
    errors = [json.loads((tmp_path / name / "out" / "KEYS35_ASSEMBLY_REPORT.json").read_text())["proxy_errors"]
              for name in ("first", "cpu")]
    for ours, theirs in zip(*errors, strict=True):
        assert ours["mean"] == pytest.approx(theirs["mean"], rel=0.02)


def behind_prefix(source: Path, root: Path, backend: str) -> tuple[dict[str, str], list[float]]:
    """The first layers of a job behind the quantized prefix, all of it on a GPU; files, and proxy errors of layer 0."""
    recipe = small_recipe(encoder={"prefix": "quantized", "backend": backend})
    with open_job(source, recipe, root / "work") as job:
        if backend == "cpu":
            encode_behind_prefix(job, 0, calibration_windows(job)["fit"], {})
        else:
            run(job, root / "out", Progress(job.work), tp=1)
        errors = job.work.require(dense_unit(0))["data"]["proxy_error"]
    return digest(root / "out"), [errors[name] for name in sorted(errors)]


def test_a_quantized_prefix_repeats_on_a_gpu_and_encodes_as_on_the_cpu(source, tmp_path) -> None:
    (first, ours), (second, _) = (behind_prefix(source, tmp_path / name, "cuda") for name in ("first", "second"))
    made = {name for name in first if name.endswith((".safetensors", ".json")) and "MAKING" not in name}
    assert made and {name: first[name] for name in made} == {name: second[name] for name in made}
    _, theirs = behind_prefix(source, tmp_path / "cpu", "cpu")
    assert ours == pytest.approx(theirs, rel=0.05)
