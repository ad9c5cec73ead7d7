"""Validation: what it refuses before its hours begin."""

import subprocess
from pathlib import Path

import pytest

from keys35.demo import MODEL
from keys35.errors import PlanError
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
