"""Validation: what it refuses before its hours begin."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keys35.demo import MODEL
from keys35.errors import ContractError, Keys35Error, PlanError, RankError, RecipeError, SourceError
from keys35.files.atomic import save_tensors
from keys35.glm.stream import trunk
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.runtime.group import RankGroup
from keys35.runtime.panel import Panel
from keys35.stages.validate import _agreement, _logits, recipe_of, validate


def test_a_checkpoint_on_a_disk_that_is_only_read(tmp_path: Path) -> None:
    out, scratch = tmp_path / "disk", tmp_path / "scratch"
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", out], capture_output=True).returncode:
        pytest.skip("mounting needs privileges")
    try:
        with pytest.raises(PlanError, match="disk cannot be written.*--panel"):
            validate(out, MODEL, load_recipe("demo"), 1, scratch, Progress())
    finally:
        subprocess.run(["umount", out], check=True)
    assert not scratch.exists()


@pytest.mark.parametrize(
    ("spoil", "tp", "error", "words"),
    [("cut", 1, SourceError, "00002"), ("gone", 1, SourceError, "00002"), ("vocabulary", 1, PlanError, "of 4096"),
     ("", 3, PlanError, "tp = 3")],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_scored_is_refused_before_the_source_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str, tp: int, error: type[Keys35Error], words: str
) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the source is streamed")

    monkeypatch.setattr("keys35.stages.validate.make_reference", too_late)
    out = Path(shutil.copytree(MODEL, tmp_path / "out"))
    shard, config = out / "model-00002-of-00002.safetensors", out / "config.json"
    if spoil == "cut":
        shard.write_bytes(shard.read_bytes()[:-9])
    if spoil == "gone":
        shard.unlink()
    if spoil == "vocabulary":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 4096}))
    with pytest.raises(error, match=words):
        validate(out, MODEL, load_recipe("demo"), tp, tmp_path / "scratch", Progress())


def test_a_reference_that_is_not_its_configs_is_refused_before_it_is_streamed(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer after layer was read until a product failed, by a traceback; and a checkpoint that had lost its block of
    quantization was taken for BF16, of which it then lost nothing."""
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the source is streamed")

    monkeypatch.setattr("keys35.stages.validate.make_reference", too_late)
    other, stripped = (Path(shutil.copytree(root, tmp_path / root.name)) for root in (MODEL, tiny.out))
    for root, change in ((other, {"moe_intermediate_size": 256}), (stripped, {"quantization_config": None})):
        config = root / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    for root, words in ((other, "does not match its config"), (stripped, "EXL3 checkpoint, as its .*trellis tells")):
        with pytest.raises(SourceError, match=words):
            validate(tmp_path, root, load_recipe("demo"), 1, tmp_path / "scratch", Progress())


def test_a_rank_that_dies_while_the_reference_is_made_is_told_of_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told of when the source had been streamed twice."""
    made, passes = [], []

    class Group(RankGroup):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            made.append(self)

    def slow(*args: object, **options: object) -> list[Tensor]:
        passes.append(1)
        made[0]._process.send_signal(signal.SIGKILL)
        made[0]._process.wait()
        return trunk(*args, **options)

    monkeypatch.setattr("keys35.stages.validate.RankGroup", Group)
    monkeypatch.setattr("keys35.runtime.reference.trunk", slow)
    recipe = load_recipe("demo")
    recipe = recipe.model_copy(update={"panel": recipe.panel.model_copy(update={"window": 32, "windows": 2})})
    with pytest.raises(RankError, match="torchrun, which starts the ranks, was killed by signal 9"):
        validate(Path(shutil.copytree(MODEL, tmp_path / "out")), MODEL, recipe, 2, tmp_path / "scratch", Progress())
    assert len(passes) == 1


def test_a_panel_of_the_makers_own_is_looked_for_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a checkpoint says no paths, so that a set named by a relative one is found from there alone."""
    (tmp_path / "words.txt").write_text("It was the best of times, it was the worst of times. \n" * 40)
    (tmp_path / "mine.toml").write_text(
        'version = 1\n[[domain]]\nname = "a"\nshare = 1\nfiles = ["words.txt"]\ndocuments = "line"\n')
    demo = load_recipe("demo")
    recipe = demo.model_copy(update={"panel": demo.panel.model_copy(update={"set": "mine.toml", "windows": 1})})
    monkeypatch.setattr("keys35.stages.validate.make_reference", lambda *_, **__: pytest.skip("found"))
    with pytest.raises(RecipeError, match="panel 'mine.toml': no calibration set.*job was begun.*--panel"):
        validate(MODEL, MODEL, recipe, 1, tmp_path / "scratch", Progress())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.skip.Exception):
        validate(MODEL, MODEL, recipe, 1, tmp_path / "scratch", Progress())


def test_a_report_that_is_no_report_is_refused(tmp_path: Path) -> None:
    """Whole JSON that is no object was a traceback."""
    (tmp_path / "KEYS35_ASSEMBLY_REPORT.json").write_text("[]")
    with pytest.raises(ContractError, match="KEYS35_ASSEMBLY_REPORT.json: it is no object; it is no keys35 checkpoint"):
        recipe_of(tmp_path)


def logits_of_ranks_and_one(root: Path, apart: Tensor) -> tuple[Panel, Tensor]:
    """What one process gave and, `apart` from it, four ranks, as they are saved; the panel and the former."""
    alone = torch.randn(2, 20, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ranks, logits in (("1", alone), ("4", alone + apart)):
        for window, rows in enumerate(logits):
            save_tensors(root / ranks / "logits" / f"window-{window:05d}.safetensors", {"logits": rows})
    return Panel.of("two", torch.arange(40).view(2, 20), ["prose", "code"]), alone


def test_agreement_of_ranks_is_of_all_rows_and_never_of_whole_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GLM-5.3's vocabulary a window of 2,048 tokens takes 2.5 GB; seven times that were held."""
    monkeypatch.setattr("keys35.stages.validate.LOGIT_ROWS", 8)
    apart = torch.zeros(2, 20, 50, dtype=torch.float64)
    apart[1, 19, 3] = 5e-4
    panel, alone = logits_of_ranks_and_one(tmp_path, apart)
    kl = torch.nn.functional.kl_div((alone + apart).log_softmax(-1), alone.softmax(-1), reduction="none").sum(-1).mean()
    assert _agreement(panel, tmp_path, 4) == pytest.approx({"max_logit_difference": 5e-4, "kl": float(kl)}, abs=1e-15)
    assert [len(rows) for rows in _logits(tmp_path / "4" / "logits" / "window-00001.safetensors")] == [8, 8, 4]


@pytest.mark.parametrize("wrong", [2e-3, float("nan")])
def test_ranks_that_disagree_are_refused(tmp_path: Path, wrong: float) -> None:
    """NaN is not larger than any bound, and passed for agreement."""
    apart = torch.zeros(2, 20, 50, dtype=torch.float64)
    apart[0, 11, 7] = wrong
    panel, _ = logits_of_ranks_and_one(tmp_path, apart)
    with pytest.raises(RankError, match="4 ranks and one process disagree"):
        _agreement(panel, tmp_path, 4)
