"""What calibration does to some experts and rows: none, three, not finite, and text of another tokenizer."""

import json
import shutil

import pytest
import torch
from builders import write_checkpoint
from small import small_recipe, small_source

from keys35.errors import PlanError, SourceError
from keys35.files.source import ShardedSource
from keys35.progress import Progress
from keys35.report.facts import REPORT
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble
from keys35.stages.capture import calibration_windows, capture, layer_rows
from keys35.stages.check import check
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize

GATE, BIAS = (f"model.layers.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias"))
THREE, NEVER = 2, 3  # of four experts, two a token
DEAD = "model.layers.1.mlp.experts.0.gate_proj"  # some of its rows are zero
RECIPE = small_recipe(experts={"widths": [3, 4], "bits": 3.25, "group": 2, "fallback": False})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return small_source(tmp_path_factory.mktemp("starved") / "plain", mtp=False)


def changed(source, root, change):
    opened = ShardedSource.open(source)
    tensors = {name: opened.read(name) for name in opened.tensors}
    change(tensors)
    side = {"tokenizer.json": (source / "tokenizer.json").read_bytes()}
    return write_checkpoint(root, tensors, shards=2, config=opened.config, side_files=side)


def starving(source, work):
    """A change of the router after which, by its own arithmetic, one expert has three fit rows and one none."""
    with open_job(source, RECIPE, work) as job:
        windows = calibration_windows(job)
        for layer in (0, 1):
            capture(job, job.store, layer, windows)()
        x = layer_rows(job, 1, windows).fit.x.double()
    gate, bias = (ShardedSource.open(source).read(name).double() for name in (GATE, BIAS))
    scores = torch.sigmoid(x @ gate.T)
    needed = ((scores + bias)[:, :2].min(dim=1).values - scores[:, THREE]).sort().values
    value = float(needed[2:4].mean())

    def change(tensors):
        tensors[BIAS][THREE], tensors[BIAS][NEVER] = value, -100.0
        tensors[f"{DEAD}.weight"][[5, 9]] = 0
    return change


@pytest.fixture(scope="module")
def starved(plain, tmp_path_factory):
    root = tmp_path_factory.mktemp("starved")
    source = changed(plain, root / "source", starving(plain, root / "look"))
    with open_job(source, RECIPE, root / "work") as job:
        measure(job, Progress())
        allocate(job)
        quantize(job, Progress())
        assemble(job, root / "out", Progress())
        receipts = [job.work.require(f"experts/layer-001/{first:04d}")["data"] for first in (0, 2)]
    return source, root / "out", receipts


def test_an_expert_without_rows_and_one_with_three_are_encoded_like_any(starved):
    source, out, receipts = starved
    rows, shrink = ([value for data in receipts for value in data[key]] for key in ("fit_rows", "shrink"))
    assert rows[THREE] == 3 and rows[NEVER] == 0
    tokens = 12 * 160
    assert sum(rows) == 2 * tokens, "top-2 of every token, each counted once"
    assert shrink[NEVER] == 1.0 and shrink[THREE] == pytest.approx(128 / 131) and shrink[0] == 0.25
    assert not any(data["fallback"] for data in receipts)
    numbers = json.dumps(receipts)
    assert "NaN" not in numbers and "Infinity" not in numbers
    report = check(out, reference=source, deep=True, expected=RECIPE)
    assert report.ok, report.findings


def test_an_expert_without_rows_is_listed(starved):
    _, out, _ = starved
    _, warning = json.loads((out / "KEYS35_ASSEMBLY_REPORT.json").read_text())["warnings"]
    assert "layer-001" in warning and f"experts [{NEVER}] saw no calibration row" in warning


def test_dead_rows_of_the_source_are_no_fault_though_it_is_not_there(starved, tmp_path):
    """Only the source told that columns may be zero: `check` alone refused such a checkpoint, and so did `upload`."""
    _, out, _ = starved
    assert json.loads((out / REPORT).read_text())["zero_columns"] == {f"{DEAD}.svh": 2}
    assert check(out).ok
    copied = shutil.copytree(out, tmp_path / "out")
    for listed in ({}, {f"{DEAD}.svh": 1}, {f"{DEAD}.svh": 2, f"{DEAD.replace('gate', 'up')}.svh": 1}, 5):
        report = json.loads((out / REPORT).read_text()) | {"zero_columns": listed}
        (copied / REPORT).write_text(json.dumps(report))
        assert "svh-zero" in {finding.rule for finding in check(copied).findings}


def test_what_has_no_usable_hessian_is_named_though_it_was_only_simulated(plain, tmp_path):
    silent = "model.layers.1.mlp.experts.0"

    def change(tensors):
        tensors[f"{silent}.up_proj.weight"][:] = 0

    source = changed(plain, tmp_path / "source", change)
    recipe = RECIPE.model_copy(update={"experts": RECIPE.experts.model_copy(update={"measure": "predicted"})})
    with open_job(source, recipe, tmp_path / "work") as job:
        measure(job, Progress())
        before = job.work.require("experts/layer-001/0000")["data"]
        assert before["error"][0] is None and before["simulated"][0] == [0.0, 0.0] and before["fallback"] == []
        allocate(job)
        quantize(job, Progress())
        assert job.work.require("experts/layer-001/0000")["data"]["fallback"] == [f"{silent}.down_proj"]


def test_activations_that_overflow_end_the_run_where_they_arise(plain, tmp_path):
    """Finite weights whose products are not: no row of them may reach a Hessian."""
    def change(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"][5] = 3e38

    source = changed(plain, tmp_path / "source", change)
    with open_job(source, RECIPE, tmp_path / "work") as job:
        with pytest.raises(SourceError, match="layer 0 gives values that are not finite.*\n.*the arithmetic overflows"):
            measure(job, Progress())
        assert job.work.receipt("measure/capture/layer-000") is None and not list(job.work.root.rglob("experts/*/*"))


def test_a_calibration_file_of_another_tokenizer_is_refused_before_any_work(plain, tmp_path):
    lines = [{"tokenizer_sha256": "0" * 64}, *({"ids": list(range(n, n + 300))} for n in range(40))]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "mine.toml").write_text('version = 1\n[[domain]]\nname = "mine"\nshare = 1\nfiles = ["mine.jsonl"]\n'
                                        'documents = "line"\n')
    calibration = RECIPE.calibration.model_copy(update={"set": str(tmp_path / "mine.toml")})
    recipe = RECIPE.model_copy(update={"calibration": calibration})
    with open_job(plain, recipe, tmp_path / "work") as job:
        with pytest.raises(PlanError, match=r"mine.jsonl holds token ids of another tokenizer \(000000000000"):
            measure(job, Progress())
        assert not list(job.work.units())
