"""Disks that are or become too small: refused before a stage, stopped cleanly in it, resumed to the same bytes."""

import errno
import subprocess
from pathlib import Path

import pytest
from small import digest
from tiny import tiny_recipe

from keys35.errors import PlanError, ResumeError
from keys35.files import atomic
from keys35.files.hashed import Hashed
from keys35.progress import Progress
from keys35.stages import schedule
from keys35.stages.capture import calibration_windows
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.plan import plan


def pieces(work: Path) -> dict[str, str]:
    """What `measure` leaves of the routed experts, with their receipts."""
    prefixes = tuple(f"{folder}/layer-00{layer}" for folder in ("experts", "receipts/experts") for layer in (1, 2))
    return {name: value for name, value in digest(work).items() if name.startswith(prefixes)}


def test_too_little_room_is_refused_before_the_stage(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with open_job(tiny.source, tiny_recipe(), tmp_path / "work") as job:
        with pytest.raises(PlanError, match="1048576 are free"):
            measure(job, Progress())
    assert not (tmp_path / "work" / "states").exists()


def test_a_disk_that_fills_up_stops_between_units(tiny, tmp_path: Path, monkeypatch) -> None:
    with open_job(tiny.source, tiny_recipe(), tmp_path / "work") as job:
        calibration_windows(job)
        answers = iter([1 << 40, 0])  # for the passes of layers 0 and 1
        monkeypatch.setattr(schedule, "free_bytes", lambda root: next(answers))
        with pytest.raises(ResumeError, match="nearly full, 0 bytes are free and layer 1.*run the same command again"):
            measure(job, Progress())
    units = {path.stem for path in (tmp_path / "work/receipts/measure/capture").iterdir()}
    assert units == {"layer-000"}


def test_a_write_that_fails_for_room_leaves_nothing_and_is_resumed(tiny, tmp_path: Path, monkeypatch) -> None:
    write, room = Hashed.write, [2_000_000]

    def until_full(self, piece, *own) -> None:
        room[0] -= len(piece)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, piece, *own)

    with monkeypatch.context() as patch, open_job(tiny.source, tiny_recipe(), tmp_path / "work") as job:
        patch.setattr(Hashed, "write", until_full)
        with pytest.raises(ResumeError, match="disk full, needed .* run the same command again"):
            measure(job, Progress())
        assert not list(job.work.root.rglob("*.partial")) and (job.work.root / "experts").is_dir()
    with open_job(tiny.source, tiny_recipe(), tmp_path / "work") as job:
        measure(job, Progress())
        assert pieces(job.work.root) == pieces(tiny.work)


@pytest.mark.slow
def test_a_small_disk_really_filled(tiny, tmp_path: Path, monkeypatch) -> None:
    """A tmpfs too small for the job, the checks before it switched off; then it grows and the job goes on."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], capture_output=True).returncode:
        pytest.skip("mounting needs privileges")
    try:
        with monkeypatch.context() as patch, open_job(tiny.source, tiny_recipe(), mount / "work") as job:
            patch.setattr(schedule, "require_space", lambda root, needed: None)
            patch.setattr(schedule, "free_bytes", lambda root: 1 << 40)
            with pytest.raises(ResumeError, match="disk full"):
                measure(job, Progress())
        subprocess.run(["mount", "-o", "remount,size=64m", mount], check=True)
        with open_job(tiny.source, tiny_recipe(), mount / "work") as job:
            measure(job, Progress())
            resumed = pieces(job.work.root)
    finally:
        subprocess.run(["umount", mount], check=True)
    assert resumed == pieces(tiny.work)


@pytest.mark.slow
def test_states_in_bfloat16_take_half_and_are_planned_so(tiny, tmp_path: Path) -> None:
    sizes = {}
    for states in ("float32", "bfloat16"):
        choice = tiny_recipe().calibration.model_copy(update={"states": states})
        recipe = tiny_recipe(calibration=choice.model_dump())
        planned = plan(tiny.source, recipe, tp=1).work_parts
        with open_job(tiny.source, recipe, tmp_path / states) as job:
            measure(job, Progress())
            found = [path.stat().st_size for path in (job.work.root / "states").iterdir()]
            rows = [path.stat().st_size for path in (job.work.root / "rows").iterdir()]
        assert len(found) == 1 and len(rows) == 1, "the last trunk layer's, for the MTP layer, and the MTP layer's rows"
        assert 2 * found[0] <= planned["states of two layers"] <= 2.3 * found[0]
        assert planned["rows of two layers"] == pytest.approx(2 * rows[0], rel=0.03)
        sizes[states] = found[0]
    assert sizes["bfloat16"] == pytest.approx(sizes["float32"] / 2, rel=0.02)
