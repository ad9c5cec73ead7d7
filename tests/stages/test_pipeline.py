"""The whole job on a small trained model: what it promises, held against the files it wrote."""

import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from small import small_recipe

from keys35.errors import PlanError, ResumeError
from keys35.exl3.linear import decode_weight
from keys35.files.headers import read_header
from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.report.facts import of_another_job
from keys35.stages.allocate import ALLOCATION
from keys35.stages.assemble import assemble, prepare
from keys35.stages.check import check
from keys35.stages.costs import read_measured
from keys35.stages.job import open_job, resume_job
from keys35.stages.pipeline import run
from keys35.stages.quantize import quantize
from keys35.stages.units import ExpertUnit, expert_units


def stored(out):
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(out / file, "pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}
    assert set(tensors) == set(index["weight_map"])
    return tensors


def test_output_keeps_the_contract(finished):
    report = check(finished.out, reference=finished.source, deep=True, expected=finished.recipe)
    assert report.ok, report.findings
    assert report.routed_mean == Fraction(11, 4)
    assert len(list(finished.out.glob("*.safetensors"))) == finished.recipe.output.shards


def test_widths_by_trellis_shape(finished):
    tensors = stored(finished.out)
    widths = {name: t.shape[-1] / 16 for name, t in tensors.items() if name.endswith(".trellis")}
    routed = {n: w for n, w in widths.items() if ".mlp.experts." in n and ".layers.1." in n}
    assert sum(routed.values()) / len(routed) == 2.75
    for expert in range(4):
        assert len({w for n, w in routed.items() if f".experts.{expert}." in n}) == 1
    assert {w for n, w in widths.items() if ".experts." in n and ".layers.2." in n} == {4.0}
    assert {w for n, w in widths.items() if ".mlp.experts." not in n} == {5.0}


def test_carried_tensors_are_the_source(finished):
    carried = {n: t for n, t in stored(finished.out).items() if n.endswith((".weight", "_bias", "norm.bias"))}
    source = stored(finished.source)
    assert carried["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    for name, tensor in carried.items():
        assert tensor.dtype == source[name].dtype and torch.equal(tensor, source[name]), name


def test_kv_a_is_padded_with_zero_scales(finished):
    tensors = stored(finished.out)
    prefix = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    svh = tensors[f"{prefix}.svh"]
    assert tensors[f"{prefix}.trellis"].shape[1] * 16 == 256 == len(svh)
    assert not svh[160:].any() and svh[:160].all()


def test_ranks_agree_with_one_process(finished):
    against = finished.result["validation"]["tp_against_one"]
    assert against["max_logit_difference"] <= 1e-3
    assert against["kl"] <= 1e-5


def test_each_rank_reads_its_share(finished):
    quality = finished.result["validation"]
    for rank in quality["ranks"]:
        assert rank["bytes_read"] == rank["sharded"] + rank["replicated"]
    sharded = sum(rank["sharded"] for rank in quality["ranks"])
    replicated = quality["ranks"][0]["replicated"]
    # scales and markers of a split linear are needed whole on every rank, so the sum is a little more than all
    assert quality["checkpoint_bytes"] <= sharded + replicated < 1.05 * quality["checkpoint_bytes"]


def test_measured_error_is_the_layers_output_error(finished):
    """Recomputed in float64 straight from the definition, from the rows of a fresh calibration pass."""
    from keys35.stages.capture import calibration_windows, layer_rows, require_rows

    with resume_job(finished.work) as job:
        windows = calibration_windows(job)
        require_rows(job, job.store, 1, windows)
        rows = layer_rows(job, 1, windows)
        unit = expert_units(job, 1)[1]
        expert = unit.experts[0]
        measured = read_measured(job).error[0][expert]
        found = []
        for width in (2, 3):
            with safe_open(unit.file(job, width), "pt") as handle:
                found.append(_float64_error(job, rows, expert, handle))
    assert torch.allclose(torch.tensor(measured), torch.stack(found), rtol=1e-3)


def _float64_error(job, rows, expert, handle):
    prefix = f"model.layers.1.mlp.experts.{expert}"
    exact, coded = [], []
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        exact.append(job.source.read(f"{prefix}.{leaf}.weight").double().T)
        parts = [handle.get_tensor(f"{prefix}.{leaf}.{part}") for part in ("trellis", "suh", "svh")]
        coded.append(decode_weight(*parts).double())
    x = rows.selection.x.double()
    error = torch.zeros(rows.domains, dtype=torch.float64)
    for token in range(len(x)):
        for slot in range(rows.selection.expert_ids.shape[1]):
            if rows.selection.expert_ids[token, slot] == expert:
                y, q = (
                    (torch.nn.functional.silu(x[token] @ g) * (x[token] @ u)) @ d for g, u, d in (exact, coded)
                )
                g2 = rows.selection.weights[token, slot].double() ** 2
                error[rows.domain[token]] += g2 * (y - q).square().sum()
    return error / torch.bincount(rows.domain)


def test_allocation_is_exact_and_its_baselines_have_the_same_bytes(finished):
    allocation = json.loads((finished.work / ALLOCATION).read_text())
    for name, entry in allocation["sets"].items():
        if not name.startswith("uniform"):
            assert Fraction(entry["mean"]) == Fraction(11, 4), name
    best = allocation["sets"]["allocation"]["predicted_kl"]
    assert all(best <= entry["predicted_kl"] + 1e-12 for n, entry in allocation["sets"].items() if n != "uniform-3")


def test_baselines_score_the_assembled_checkpoint_itself(finished):
    """The work directory's mix and the assembled files are the same model."""
    direct = finished.result["baselines"]["allocation"]["kl"]
    assert finished.result["validation"]["metrics"]["kl"] == pytest.approx(direct, rel=1e-4)


def test_second_run_keeps_everything(finished):
    ticks = []
    with resume_job(finished.work) as job:
        quantize(job, Progress(show=ticks.append))
        assemble(job, finished.out, Progress(show=ticks.append))
    last = {tick.stage: tick for tick in ticks}
    assert all(tick.kept == tick.total for tick in last.values())


def test_a_damaged_piece_is_encoded_again_alone(finished):
    """Truncation is noticed by size, and the same bytes come back."""
    with resume_job(finished.work) as job:
        unit = ExpertUnit(1, range(0, 2))
        path = unit.file(job, 2)
        before = path.read_bytes()
        others = {p: p.stat().st_mtime_ns for p in (finished.work / "experts").rglob("*k2*")}
        path.write_bytes(before[:-1024])
        quantize(job, Progress())
        assert path.read_bytes() == before
        touched = [p.name for p, t in others.items() if p.stat().st_mtime_ns != t]
    assert touched == [path.name]


def test_a_changed_piece_is_never_published(finished, tmp_path):
    """Same size, other bytes: the hash refuses it."""
    with resume_job(finished.work) as job:
        path = ExpertUnit(1, range(2, 4)).file(job, 3)
        widths = json.loads((finished.work / ALLOCATION).read_text())["sets"]["allocation"]["widths"][0]
        chosen = 2 + widths[2:].index(3)
        entry = read_header(path).entries[f"model.layers.1.mlp.experts.{chosen}.up_proj.trellis"]
        before = path.read_bytes()
        try:
            path.write_bytes(before[: entry.end - 1] + bytes([before[entry.end - 1] ^ 1]) + before[entry.end :])
            with pytest.raises(ResumeError, match="does not match its receipt"):
                assemble(job, tmp_path / "out", Progress())
        finally:
            path.write_bytes(before)


@pytest.mark.parametrize("key", ["recipe", "source_fingerprint", "calibration_text_sha256"])
def test_another_jobs_checkpoint_is_not_written_over(finished, tmp_path, key):
    """Its files have the same names, and its quality report would stay beside our shards."""
    report = json.loads((finished.out / "KEYS35_ASSEMBLY_REPORT.json").read_text())
    report[key] = report[key] | {"seed": 36} if isinstance(report[key], dict) else "ab" * 32
    (tmp_path / "KEYS35_ASSEMBLY_REPORT.json").write_text(json.dumps(report))
    (tmp_path / "KEYS35_QUALITY.json").write_text("{}")
    with resume_job(finished.work) as job, pytest.raises(PlanError, match="another job's checkpoint"):
        assemble(job, tmp_path, Progress())
    (tmp_path / "KEYS35_ASSEMBLY_REPORT.json").write_text('{"recipe": []}')
    with resume_job(finished.work) as job, pytest.raises(PlanError, match="'recipe' is no object; choose an empty"):
        assemble(job, tmp_path, Progress())


def test_a_set_at_an_absolute_path_is_published_by_its_name(finished, tmp_path):
    """`upload` refused a home directory in a finished checkpoint, and published any other folder."""
    with resume_job(finished.work) as job:
        parts = {"calibration": job.recipe.calibration, "panel": job.recipe.panel}
        sets = {key: part.model_copy(update={"set": f"/home/me/{key}.toml"}) for key, part in parts.items()}
        recipe = job.recipe.model_copy(update=sets)
        report = assemble(replace(job, recipe=recipe), tmp_path / "out", Progress())
        stored = report["recipe"]
        assert (stored["calibration"]["set"], stored["panel"]["set"]) == ("calibration.toml", "panel.toml")
        assert Recipe.model_validate(stored).digest() == report["recipe_sha256"]
        same = replace(job.work, job=job.work.job | {"recipe": recipe.guarded()})
        assert of_another_job(report, same) == [] and of_another_job(report, job.work) == ["recipe"]
        assemble(job, finished.out, Progress())  # so that the receipts are those of this folder


def test_foreign_files_in_the_output_are_refused(finished, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00005-of-00005.safetensors").write_bytes(b"old")
    with resume_job(finished.work) as job, pytest.raises(PlanError, match="model-00005-of-00005"):
        assemble(job, out, Progress())


def test_a_file_is_no_output(tmp_path):
    """ "[Errno 17] File exists", as if of the work directory."""
    file = tmp_path / "out"
    file.write_text("mine")
    places = {name: SimpleNamespace(root=tmp_path / name) for name in ("source", "work")}
    for out in (file, file / "below"):
        with pytest.raises(PlanError, match=f"{out}: is no folder, or lies below a file"):
            prepare(SimpleNamespace(**places, recipe=small_recipe()), out)


def test_run_looks_at_the_output_before_it_measures(source, small, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with open_job(source, small, tmp_path / "work") as job:
        with pytest.raises(PlanError, match="not this job's.*thesis.txt"):
            run(job, tmp_path / "out", Progress(job.work), tp=1)
        assert job.work.units() == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 36}, "seed"),
        ({"dense": {"bits": 6}}, "dense.bits"),
        ({"experts": {"widths": [2, 3], "bits": 2.5, "group": 2}}, "experts.bits"),
    ],
)
def test_a_changed_recipe_is_refused_by_name(finished, changes, named):
    with pytest.raises(ResumeError, match=named), open_job(finished.source, small_recipe(**changes), finished.work):
        pass


def test_the_panel_may_change(finished):
    panel = {"set": "demo-panel", "window": 128, "windows": 2, "random_mixes": 2}
    with open_job(finished.source, small_recipe(panel=panel), finished.work):
        pass


def test_a_changed_source_is_refused_by_name(finished, tmp_path):
    import shutil

    copy = tmp_path / "source"
    shutil.copytree(finished.source, copy)
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ResumeError, match=shard.name), open_job(copy, finished.recipe, finished.work):
        pass


def test_report_agrees_with_the_files(finished):
    report = json.loads((finished.out / "KEYS35_ASSEMBLY_REPORT.json").read_text())
    assert report["routed_mean_bits_exact"] == "11/4"
    assert report["widths_total"] == {"2": 1, "3": 3}
    for shard in report["shards"]:
        assert (finished.out / shard["file"]).stat().st_size == shard["bytes"]
    errors = {(row["role"], row["bits"]): row["mean"] for row in report["proxy_errors"]}
    assert errors["expert", 2] > errors["expert", 3] > errors["mtp_expert", 4] > 0
    text = "".join((finished.out / f"KEYS35_{name}.json").read_text() for name in ("ASSEMBLY_REPORT", "QUALITY"))
    assert str(finished.work) not in text and "/root" not in text
