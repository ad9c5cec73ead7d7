"""The quantized prefix: layers in order, the same bytes for any workers and wherever it dies."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from io import StringIO
from pathlib import Path

import jsonschema
import pytest
import torch
from rich.console import Console
from small import digest
from tiny import CUT_IN_FOUR, begun, tiny_recipe, tiny_source

from keys35.errors import RecipeError, ResumeError
from keys35.files.ledger import Workdir
from keys35.glm import attention
from keys35.progress import Progress, Tick
from keys35.recipe import load_recipe
from keys35.report.facts import facts_of_checkpoint
from keys35.report.measured import measurements
from keys35.report.schema import load_schema
from keys35.report.terminal import show_run
from keys35.stages import candidates, prefix, streams
from keys35.stages.allocate import allocate, load_allocation
from keys35.stages.assemble import assemble
from keys35.stages.capture import calibration_windows
from keys35.stages.experts import Shelf
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.pipeline import run
from keys35.stages.plan import plan
from keys35.stages.prefix_rows import prefix_rows
from keys35.stages.quantize import quantize
from keys35.stages.shared import finish_layer
from keys35.stages.units import dense_file
from keys35.stages.workers import Workers

RECIPE = tiny_recipe(encoder={"prefix": "quantized"})


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measured and allocated work directory, to be copied."""
    work = tmp_path_factory.mktemp("prefix") / "work"
    with open_job(tiny.source, RECIPE, work) as job:
        measure(job, Progress())
        allocate(job)
    return work


@pytest.fixture(scope="module")
def whole(tiny, measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same quantized by one process and assembled: root/work, root/out."""
    root = tmp_path_factory.mktemp("whole")
    shutil.copytree(measured, root / "work")
    make(tiny, root)
    return root


def make(tiny, root: Path, workers: Workers | None = None) -> None:
    with open_job(tiny.source, RECIPE, root / "work") as job:
        quantize(job, Progress(), workers or Workers(1))
        assemble(job, root / "out", Progress())


def test_states_and_encoder_hold_one_layers_weights_at_a_time(
    tiny, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU holds a layer whole: the MTP layer was there twice, once for what enters it."""
    shutil.copytree(whole / "work", tmp_path / "work")
    loaded, most, load = weakref.WeakSet(), [], streams.layer_weights

    def watched(*arguments: object, **named: object) -> object:
        weights = load(*arguments, **named)
        loaded.add(weights)
        most.append(len(loaded))
        return weights

    for module in (prefix, streams):
        monkeypatch.setattr(module, "layer_weights", watched)
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        dense = dense_file(job, 3).read_bytes()
        prefix.encode_behind_prefix(job, 3, calibration_windows(job)["fit"], load_allocation(job), streams.Handed())()
        assert dense_file(job, 3).read_bytes() == dense
    assert most == [1] * 8, "three layers before it by halves, and its own for its input and to be encoded"


def test_measured_experts_stay_and_nothing_passing_does(tiny, measured: Path, whole: Path) -> None:
    plain = {name: value for name, value in digest(tiny.work / "experts").items() if "layer-003" not in name}
    assert digest(whole / "work/experts") == digest(measured / "experts") == plain, "all but the MTP layer's"
    assert not list((whole / "work/prefix").iterdir()) and not list((whole / "work/rows").iterdir())
    weights = {name for name in digest(whole / "out") if name.endswith("safetensors")}
    mine, plain = digest(whole / "out"), digest(tiny.out)
    assert weights and {name for name in weights if mine[name] == plain[name]} <= {
        "model-00001-of-00006.safetensors", "model-00006-of-00006.safetensors"}, "embedding, norm and head are carried"


def test_two_workers_make_the_same_bytes(tiny, measured: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(measured, tmp_path / "work")
    make(tiny, tmp_path, Workers(2))
    assert digest(tmp_path / "out") == digest(whole / "out")


def test_rows_in_memory_are_those_on_disk(tiny, whole: Path, tmp_path: Path) -> None:
    """A process that encodes on them itself does not wait for the file."""
    shutil.copytree(whole / "work", tmp_path / "work")
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        shelf = Shelf(job)
        fit, allocation = calibration_windows(job)["fit"], load_allocation(job)
        prefix.encode_behind_prefix(job, 1, fit, allocation, streams.Handed(), shelf)()
        kept, read = shelf.rows[1], prefix_rows(job, 1)
        assert torch.equal(kept.half, read.half) and torch.equal(kept.fit.weights, read.fit.weights)
        assert all(torch.equal(getattr(kept, name), getattr(read, name)) for name in ("source", "missing", "hessian"))
        assert kept.nbytes == read.nbytes == 3 * kept.fit.x.nbytes


class Killed(BaseException):
    """What a kill looks like from inside: nothing that follows is done."""


def die_at(monkeypatch: pytest.MonkeyPatch, moments: list[tuple[str, str]]) -> None:
    """Be killed before or behind a unit's receipt, the first of those that are left."""
    commit = Workdir.commit

    def dying(self: Workdir, unit: str, *rest: object) -> None:
        if moments[:1] == [(unit, "before")]:
            raise Killed
        commit(self, unit, *rest)
        if moments[:1] == [(unit, "behind")]:
            raise Killed

    monkeypatch.setattr(Workdir, "commit", dying)


def test_dying_anywhere_changes_nothing(
    tiny, measured: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(measured, tmp_path / "work")
    moments = [
        ("quantize/dense/layer-001", "before"), ("final/layer-001/0001", "behind"), ("final/layer-001/0003", "behind"),
        ("quantize/shared/layer-001", "before"), ("quantize/shared/layer-001", "behind"),
        ("quantize/dense/layer-002", "before"), ("quantize/dense/layer-002", "behind"),
        ("quantize/shared/layer-002", "behind"), ("quantize/dense/layer-003", "before"),
    ]
    die_at(monkeypatch, moments)
    while moments:
        with pytest.raises(Killed):
            make(tiny, tmp_path)
        moments.pop(0)
    make(tiny, tmp_path)
    assert digest(tmp_path / "out") == digest(whole / "out")
    units = [unit for unit in begun(tmp_path / "work") if unit.startswith("final/")]
    assert len(units) == len(set(units)), "no expert is encoded again that was finished"


def test_attention_is_passed_three_times_a_layer_wherever_it_dies(
    tiny, measured: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind it is kept until the layer is finished, in place of what lies before it."""
    shutil.copytree(measured, tmp_path / "work")
    passed, moments = windows_attended(monkeypatch), [("final/layer-002/0003", "behind")]
    die_at(monkeypatch, moments)
    fit = RECIPE.calibration.fit_windows
    with pytest.raises(Killed):
        make(tiny, tmp_path)
    assert sum(passed) == 3 * 3 * fit
    assert names(tmp_path / "work/prefix") == [f"layer-002-{name}.safetensors" for name in (
        "quantized", "rows-found", "rows-missing", "rows-source", "source")]
    moments.clear()
    make(tiny, tmp_path)
    assert sum(passed) == 3 * 4 * fit, "the MTP layer, too; and nothing again"
    assert digest(tmp_path / "out") == digest(whole / "out")


def windows_attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by how many windows attention mixes values of, pass by pass."""
    attend, passed = attention._attend, []

    def counted(config: object, query: torch.Tensor, *rest: object) -> torch.Tensor:
        passed.append(len(query))
        return attend(config, query, *rest)

    monkeypatch.setattr(attention, "_attend", counted)
    return passed


@pytest.mark.parametrize("damaged", [False, True])
def test_lost_rows_are_made_again_from_the_states_behind_attention(
    tiny, measured: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Damaged ones are to be deleted: no layer before theirs is passed again, which for a large model is an hour."""
    shutil.copytree(measured, tmp_path / "work")
    for unit in ("final/layer-002/0001", "final/layer-003/0001"):
        rows = tmp_path / "work/prefix" / f"{unit.split('/')[1]}-rows-missing.safetensors"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            die_at(patch, [(unit, "behind")])
            make(tiny, tmp_path)
        kept = rows.read_bytes()
        if damaged:
            rows.write_bytes(kept[:-1] + b"?")
            with pytest.raises(ResumeError, match="rows.*delete it and run the same command again"):
                make(tiny, tmp_path)
        rows.unlink()
    passed = windows_attended(monkeypatch)
    make(tiny, tmp_path)
    assert sum(passed) == 2 * RECIPE.calibration.fit_windows, "the MTP layer's, whose states are not kept"
    assert digest(tmp_path / "out") == digest(whole / "out")


def test_states_made_again_behind_attention_read_no_expert_of_their_layer(
    tiny, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would hold them all."""
    shutil.copytree(whole / "work", tmp_path / "work")
    asked = []

    class Asked(candidates.Candidates):
        def __init__(self, job: object, layer: int, final: bool = False) -> None:
            asked.append(layer)
            super().__init__(job, layer, final)

    monkeypatch.setattr(candidates, "Candidates", Asked)
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        streams.states_attended(job, 2, calibration_windows(job)["fit"], load_allocation(job))
    assert asked == [1]


def test_no_states_stay_that_nobody_comes_for(tiny, whole: Path, tmp_path: Path) -> None:
    """Not beside the last layer's rows, nor of layers that were finished before."""
    shutil.copytree(whole / "work", tmp_path / "work")
    handed = streams.Handed()
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        windows, allocation = calibration_windows(job)["fit"], load_allocation(job)
        for layer in (1, 2):
            prefix.encode_behind_prefix(job, layer, windows, allocation, handed)()
        assert list(handed.attended) == [2]
        for layer in (1, 2):
            finish_layer(job, layer, windows, allocation, handed)
        assert list(handed.onward) == [2]
        prefix.encode_behind_prefix(job, 3, windows, allocation, handed)()
    assert not handed.onward and not handed.attended


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_damaged_states_behind_attention_are_refused_and_lost_ones_made_again(
    tiny, measured: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(measured, tmp_path / "work")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, [("final/layer-002/0003", "behind")])
        make(tiny, tmp_path)
    kept = tmp_path / "work/prefix/layer-002-quantized.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    with pytest.raises(ResumeError, match="quantized.*delete it and run the same command again"):
        make(tiny, tmp_path)
    kept.unlink()
    make(tiny, tmp_path)
    assert digest(tmp_path / "out") == digest(whole / "out")


KILLED_BEHIND = (
    "quantize/dense/layer-000", "quantize/dense/layer-001", "final/layer-001/0001", "quantize/shared/layer-001",
    "quantize/dense/layer-002", "final/layer-002/0002", "quantize/shared/layer-002", "quantize/dense/layer-003",
    "final/layer-003/0003",
)
"""Receipts whose appearance is followed by a kill -9, at a random moment of the unit after it."""


@pytest.mark.slow
def test_killed_behind_units_of_every_kind(tiny, measured: Path, whole: Path, tmp_path: Path) -> None:
    """kill -9 of the driver and its two workers; the same command goes on, to the bytes of a run left alone."""
    shutil.copytree(measured, tmp_path / "work")
    line = [sys.executable, "-m", "keys35.cli", "quantize", "--work", str(tmp_path / "work"), "--workers", "2"]
    chance, killed = random.Random(51), 0
    for unit in KILLED_BEHIND:
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        while not (tmp_path / f"work/receipts/{unit}.json").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1.5))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed >= len(KILLED_BEHIND) - 1, "only the last unit leaves nothing to be killed in"
    make(tiny, tmp_path, Workers(2))
    assert digest(tmp_path / "out") == digest(whole / "out")
    units = [unit for unit in begun(tmp_path / "work") if unit.startswith("final/")]
    assert len(units) - len(set(units)) <= 2 * killed, "a kill costs at most what two workers were doing"


def test_measurements_name_the_mtp_layers_experts(tiny, whole: Path) -> None:
    """They are encoded once, behind the prefix; what the source's prefix gives them is another run's to say."""
    mine, plain = (measurements(Workdir.open(root, None))["layers"] for root in (whole / "work", tiny.work))
    assert set(mine) == set(plain) == {"1", "2", "3"}
    assert mine["3"]["widths"] == [4] and len(mine["3"]["proxy_error"]) == len(mine["3"]["fit_rows"]) == 4
    assert all(0 < error < 1 for expert in mine["3"]["proxy_error"] for error in expert)
    assert mine["1"] == plain["1"] and "selection_rows" not in mine["3"]
    written = json.loads(json.dumps(measurements(Workdir.open(whole / "work", None))))
    jsonschema.Draft202012Validator(load_schema("KEYS35_MEASUREMENTS.json")).validate(written)


def test_a_finished_job_is_kept_and_a_lost_file_made_again(tiny, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "work", tmp_path / "work")
    lost = sorted((tmp_path / "work/final/layer-002").iterdir())[0]
    before = lost.read_bytes()
    ticks: list[Tick] = []
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        quantize(job, Progress(show=ticks.append), Workers(1))
        assert ticks[-1].kept == ticks[-1].total
        lost.unlink()
        quantize(job, Progress(), Workers(1))
    assert lost.read_bytes() == before


def test_what_it_takes_is_planned(tiny) -> None:
    plain, ordered = (plan(tiny.source, recipe, tp=1) for recipe in (tiny_recipe(), RECIPE))
    assert ordered.weights_to_encode > plain.weights_to_encode
    assert ordered.work_parts["candidate encodings"] > plain.work_parts["candidate encodings"]


def test_what_glm_5_3s_recipe_asks_for_runs_to_the_end(tmp_path: Path) -> None:
    """Predicted costs behind a quantized prefix: no baseline has encodings, and the result is shown without."""
    shipped = load_recipe("glm-5.3-2.75bpw")
    chosen = {"measure": shipped.experts.measure, "widths": [3, 4], "bits": 3.25, "group": 2}
    recipe = tiny_recipe(experts=chosen, encoder={"prefix": shipped.encoder.prefix})
    assert (recipe.experts.measure, recipe.encoder.prefix) == ("predicted", "quantized")
    source = tiny_source(tmp_path / "source", **CUT_IN_FOUR)
    with open_job(source, recipe, tmp_path / "work") as job:
        result = run(job, tmp_path / "out", Progress(), tp=1)
    shown = StringIO()
    show_run(Console(file=shown, width=200), result)
    assert result["baselines"] == {} and result["warning"] is None
    assert f"{result['validation']['metrics']['kl']:.4f}" in shown.getvalue()
    found = facts_of_checkpoint(tmp_path / "out")
    assert found.behind_prefix and not found.baselines


def test_predicted_costs_and_a_prefix_encode_each_expert_once(tiny) -> None:
    """The disk that is asked for holds a sample and the chosen, as without a prefix: the chosen were there twice."""
    predicted = {"experts": {"measure": "predicted", "group": 2}}
    parts = [plan(tiny.source, tiny_recipe(**predicted, **more), tp=1).work_parts["candidate encodings"]
             for more in ({}, {"encoder": {"prefix": "quantized"}})]
    assert parts[0] == parts[1] > 0


def test_it_cannot_go_without_compensation(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("name = 'x'\n[encoder]\nprefix = 'quantized'\ncompensate = false\n")
    with pytest.raises(RecipeError, match="compensate = false"):
        load_recipe(path)
