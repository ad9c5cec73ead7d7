"""Validation: what it refuses before its hours begin."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

from keys35.demo import MODEL
from keys35.errors import ContractError, Keys35Error, PlanError, RankError, RecipeError, SourceError
from keys35.glm.stream import trunk
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.runtime.group import RankGroup
from keys35.stages.validate import recipe_of, validate


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
