"""The plan: sums that must close, sizes of the real model from its census, and cheap early refusals."""

import json
import os
import re
import shutil
import time
from fractions import Fraction
from io import StringIO
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from builders import TINY_CONFIG, random_source
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from small import small_recipe
from tiny import tiny_recipe, tiny_source

from keys35.bench.standin import write_stand_in
from keys35.errors import BudgetError, PlanError, RecipeError, SourceError
from keys35.files.atomic import sha256_file
from keys35.files.source import ShardedSource
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.report.terminal import show_plan
from keys35.stages.feasible import require_mix
from keys35.stages.job import open_job
from keys35.stages.pipeline import run
from keys35.stages.plan import plan


def test_classes_add_up_to_the_source(source, small):
    found = plan(source, small)
    opened = ShardedSource.open(source)
    assert sum(c.tensors for c in found.classes) == len(opened.tensors) == found.tensors
    assert found.source_bytes == opened.total_size
    routed = next(c for c in found.classes if c.name == "routed experts")
    assert routed.tensors == 1 * 4 * 3
    assert found.weights_per_second > 0 and found.encode_seconds > 0


def test_predicted_bytes_are_the_written_bytes(finished):
    found = plan(finished.source, finished.recipe)
    assert found.output_bytes == ShardedSource.open(finished.out).total_size
    for predicted, receipt in zip(found.shard_bytes, sorted(finished.out.glob("*.safetensors")), strict=True):
        assert 0 < receipt.stat().st_size - predicted < 100_000, "only the header is not predicted"


def test_predicted_rank_bytes_are_the_read_bytes(finished):
    found = plan(finished.source, finished.recipe, tp=2)
    for rank in finished.result["validation"]["ranks"]:
        assert rank["bytes_read"] == pytest.approx(found.rank_bytes, rel=0.02)


def test_glm_5_3_at_2_75_bits(tmp_path):
    """276.1 GB in 81 shards from the real checkpoint's headers, within a minute."""
    started = time.process_time()
    assert write_stand_in(tmp_path / "glm") == 1_506_659_919_872
    found = plan(tmp_path / "glm", load_recipe("glm-5.3-2.75bpw"))
    assert time.process_time() - started < 60
    console = Console(record=True, width=80, file=open(os.devnull, "w"))
    show_plan(console, found)
    assert "│ 753,329,940,480 │" in console.export_text(), "no digit is lost where a terminal is narrow"
    assert found.tensors == 59_585 and found.source_bytes == 1_506_659_919_872
    assert found.output_bytes == pytest.approx(276.1e9, rel=1e-3)
    assert len(found.shard_bytes) == 81 and min(found.shard_bytes) > 0 and sum(found.shard_bytes) == found.output_bytes
    routed = next(c for c in found.classes if c.name == "routed experts")
    assert routed.tensors == 75 * 256 * 3
    assert found.measured.device == "NVIDIA H200" and 2.4 < found.gpu_hours < 2.8
    assert found.unified_bytes == found.host_bytes + found.device_bytes + found.rows_bytes
    assert len(set(found.shard_bytes[4:79])) == 2, "MoE layers at the mean width, with an indexer of their own or not"
    assert found.rank_bytes / 2**30 == pytest.approx(67.5, rel=0.02), "the card says 67.5 GiB a rank in vLLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": {"shards": 9}}, "9 shards asked"),
        ({"experts": {"widths": [2, 3], "bits": 2.8, "group": 2}}, "no whole number"),
        ({"experts": {"widths": [2, 4], "bits": "9/4"}}, r"no mix of the widths \[2, 4\] over 4 experts"),
    ],
)
def test_refusals(source, changes, message, tmp_path):
    """By `plan`, and before a work directory is begun that could never be finished."""
    recipe = small_recipe(**changes)
    with pytest.raises((PlanError, BudgetError), match=message):
        plan(source, recipe)
    with pytest.raises((PlanError, BudgetError), match=message), open_job(source, recipe, tmp_path / "work"):
        pass
    assert not (tmp_path / "work").exists()


WIDTHS = st.sets(st.sampled_from([1, 1.5, 2, 2.5, 3, 4, 6]), min_size=1).map(sorted)


@given(WIDTHS, st.integers(1, 6), st.integers(0, 24))
def test_a_mean_is_refused_exactly_where_no_mix_has_it(widths, count, more):
    mean = Fraction(widths[0]) + Fraction(more, count)
    sums = {sum(map(Fraction, mix)) for mix in combinations_with_replacement(widths, count)}
    possible = (mean * count).denominator == 1 and mean * count in sums
    try:
        require_mix(widths, mean, count, "experts")
    except BudgetError:
        assert not possible
    else:
        assert possible


def test_a_model_without_routed_experts_is_refused(tmp_path):
    source = random_source(tmp_path / "source", {**TINY_CONFIG, "first_k_dense_replace": 3})
    recipe = small_recipe(output={"shards": 3})
    with pytest.raises(PlanError, match="no layer with routed experts"), open_job(source, recipe, tmp_path / "work"):
        pass


def test_what_an_earlier_run_left_needs_no_room_again(source, small, tmp_path, monkeypatch):
    """A job that had all it needed said "Not enough free space here" whenever it was resumed."""
    work, out = tmp_path / "work", tmp_path / "out"
    needed = plan(source, small)
    monkeypatch.setattr("keys35.stages.plan.free_bytes", lambda path: 1 << 10)

    def refused():
        console = Console(file=StringIO(), width=200)
        show_plan(console, plan(source, small, work, out=out))
        return "Not enough free space" in console.file.getvalue()

    with open_job(source, small, work) as job:
        job.work.path("states").write_bytes(bytes(needed.work_bytes))
    assert refused()
    out.mkdir()
    (out / "model-00001-of-00003.safetensors").write_bytes(bytes(needed.output_bytes))
    assert not refused()
    job.work.path("manifest.json").unlink()  # a folder of somebody else's, however full
    assert refused()


def test_a_tp_that_does_not_cut_is_refused(source, small):
    with pytest.raises(PlanError, match="tp = 3"):
        plan(source, small, tp=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eos_token_id": 5}, "eos_token_id is 5"),
        ({"architectures": None}, "architectures is None"),
        ({"indexer_types": ["full"] * 9}, "indexer_types is"),
        ({"rope_parameters": None, "rope_theta": 1e6}, "rope_parameters is None"),
        ({"tied_word_embeddings": False}, "tied_word_embeddings"),
    ],
)
def test_a_config_that_check_would_refuse_in_the_end_begins_no_job(source, small, tmp_path, changes, words):
    """It goes into the checkpoint as it is, and a job knows its source by it: it could not be mended later."""
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    assert [words in refusal for refusal in plan(copy, small).missing] == [True]
    with pytest.raises(SourceError, match=words), open_job(copy, small, tmp_path / "work"):
        pass
    assert not (tmp_path / "work").exists()
    with open_job(source, small, tmp_path / "work"):
        pass
    manifest = json.loads((tmp_path / "work/manifest.json").read_text())
    manifest["job"]["source"]["config.json"] = sha256_file(copy / "config.json")
    (tmp_path / "work/manifest.json").write_text(json.dumps(manifest))
    with open_job(copy, small, tmp_path / "work"):  # one that was begun before this was looked at goes on
        pass


@pytest.mark.parametrize(
    ("experts", "calibration", "words"),
    [
        ({}, {"selection_windows": 128}, None),
        ({}, {"selection_windows": 96}, "fewer than 8,192 tokens of held-out text.* in prose, code: widths are a"),
        ({}, {"selection_windows": 128, "domains": ["code"]}, "lacks its set's domains prose: widths are a random mix"),
        ({"fallback": False}, {"selection_windows": 96}, None),
        ({"widths": [2, 4], "bits": 2.5}, {"selection_windows": 128}, "widths lack 3: there is no random mix of 2.5"),
        ({"widths": [2, 4], "bits": 2.5, "fallback": False}, {"selection_windows": 128}, None),
        ({"widths": [1, 4], "bits": 2.5}, {"selection_windows": 128}, "widths lack 2 and 3: there is no random mix"),
        ({"widths": [2, 4], "bits": 3}, {"selection_windows": 128}, "widths lack 3: there is no random mix of 3 bits"),
    ],
)
def test_a_random_mix_is_announced_before_hours_are_spent_on_costs(source, experts, calibration, words):
    recipe = small_recipe(
        experts={"widths": [2, 3], "bits": 2.75, "group": 2} | experts,
        calibration={"set": "demo", "window": 128, "fit_windows": 12, "sensitivity_windows": 4} | calibration,
    )
    found = plan(source, recipe)
    shown = Console(file=StringIO(), width=300)
    show_plan(shown, found)
    assert bool(found.foregone) == bool(words) == ("Known before" in shown.file.getvalue())
    assert words is None or re.search(words, found.foregone)


def test_a_panel_on_text_that_calibration_reads_is_refused(source, small, tmp_path):
    def asked(calibration, panel):
        paths = {}
        for name, part in (("calibration", calibration), ("panel", panel)):
            paths[name] = tmp_path / f"{name}.toml"
            paths[name].write_text('version = 1\n[[domain]]\nname = "a"\nshare = 1\ndocuments = "line"\n'
                                   f'files = ["text.txt"]\npart = "{part}"\n')
        sets = {name: {"set": str(path)} for name, path in paths.items()}
        return small_recipe(**{name: small.model_dump()[name] | value for name, value in sets.items()})

    (tmp_path / "text.txt").write_text("".join(f"The {n}th of many lines of text. " * 4 + "\n" for n in range(900)))
    for parts in (("all", "all"), ("report", "report"), ("calibration", "all")):
        [refusal] = plan(source, asked(*parts)).missing
        assert "judges on text that calibration reads" in refusal and "text.txt" in refusal
        with open_job(source, asked(*parts), tmp_path / f"work-{parts}") as job:
            with pytest.raises(PlanError, match="judges on text that calibration reads"):
                run(job, tmp_path / "out", Progress(job.work), tp=1)
            assert job.work.units() == []
    assert plan(source, asked("calibration", "report")).missing == () == plan(source, small).missing


def test_a_link_that_cannot_be_carried_begins_no_job(source, small, tmp_path):
    for name, target in (("outside", __file__), ("nothing", "no-such-file")):
        copy = Path(shutil.copytree(source, tmp_path / name))
        (copy / "notes.txt").symlink_to(target)
        words = "links to|is a link to nothing"
        assert [bool(re.search(words, refusal)) for refusal in plan(copy, small).missing] == [True]
        with pytest.raises(SourceError, match=words), open_job(copy, small, tmp_path / "work"):
            pass
    assert not (tmp_path / "work").exists()


def test_run_refuses_what_four_ranks_cannot_share_before_it_measures(tmp_path):
    source, recipe = tiny_source(tmp_path / "source"), tiny_recipe()
    [refusal] = plan(source, recipe, tp=1).missing
    assert "which 4 ranks cannot share" in refusal
    with open_job(source, recipe, tmp_path / "work") as job:
        with pytest.raises(PlanError, match="which 4 ranks cannot share.*keys35 check --engine"):
            run(job, tmp_path / "out", Progress(job.work), tp=1)
        assert job.work.units() == [] and not (tmp_path / "out").exists()


def test_another_architecture_is_refused_by_name(tmp_path, source, small):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(SourceError, match="llama.*glm_moe_dsa"):
        plan(copy, small)


def test_a_missing_set_is_named(source, small):
    broken = small.model_copy(update={"calibration": small.calibration.model_copy(update={"set": "nope"})})
    with pytest.raises(RecipeError, match="nope"), open_job(source, broken, source.parent / "work"):
        pass
