"""Validation: what it refuses before its hours begin."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from keys35.demo import MODEL
from keys35.errors import Keys35Error, PlanError, RecipeError, SourceError
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.stages.validate import validate


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
