"""The ledger: jobs are guarded, damaged units are redone, a second driver is turned away."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from keys35.errors import ResumeError
from keys35.files.atomic import load_tensors, save_tensors, sha256_file
from keys35.files.ledger import Workdir, held
from keys35.report.measured import making

REPO = Path(__file__).parents[2]
JOB = {"source": {"config.json": "abc", "model-1": "5 bytes"}, "version": "0.1.0", "nothing": {},
       "recipe": {"budget": 2.75, "widths": (2, 3, 4)}, "odd": math.nan}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path) -> Workdir:
    return Workdir.open(tmp_path / "work", JOB)


def done_unit(work: Workdir, unit: str, value: float = 1.0) -> Path:
    path = work.path("units", unit, "tensors.safetensors")
    digest = save_tensors(path, {"w": torch.full((64,), value)})
    work.commit(unit, {path: digest}, {"error": 1e-05})
    return path


def test_same_job_resumes_and_other_jobs_are_listed(work: Workdir) -> None:  # case 61, 62
    assert Workdir.open(work.root, JOB).job == Workdir.open(work.root, None).job
    changed = {**JOB, "recipe": {"budget": 2.5, "widths": [2, 3]}, "version": "0.2.0", "device": "cpu"}
    changed["source"] = {"config.json": "abc", "model-1": "6 bytes"}
    with pytest.raises(ResumeError) as caught:
        Workdir.open(work.root, changed)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        'device: absent -> "cpu"', "recipe.budget: 2.75 -> 2.5", "recipe.widths: [2, 3, 4] -> [2, 3]",
        'source.model-1: "5 bytes" -> "6 bytes"', 'version: "0.1.0" -> "0.2.0"']  # fmt: skip


def test_foreign_folders_are_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ResumeError, match="is not ours"):
        Workdir.open(tmp_path, JOB)
    with pytest.raises(ResumeError, match="no manifest.json"):
        Workdir.open(tmp_path / "new", None)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path) -> None:
    """It was "[Errno 17] File exists" or "[Errno 20] Not a directory"."""
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    with pytest.raises(ResumeError, match="thesis.txt/work: is no folder, or lies below a file"):
        Workdir.open(file / "work", JOB)
    for folder in (file, file / "scratch"):
        with pytest.raises(ResumeError, match=f"{folder}: is no folder, or lies below a file"), held(folder):
            pass


def test_a_disk_of_its_own_is_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert Workdir.open(tmp_path, JOB).units() == []


def test_killed_while_creating_starts_again(tmp_path: Path) -> None:
    (tmp_path / "manifest.json.partial").write_text('{"sch')
    assert Workdir.open(tmp_path, JOB).units() == []


@pytest.mark.parametrize("damage", [
    lambda d: b"", lambda d: d[:-9], lambda d: d + b"}", lambda d: b"[]",
    lambda d: b'{"schema": 99, "job": {}}', lambda d: b'{"job": 3}',
])  # fmt: skip
def test_damaged_manifest_is_never_a_fresh_start(work: Workdir, damage: Any) -> None:  # case 66
    path = work.root / "manifest.json"
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    for job in (JOB, None):
        with pytest.raises(ResumeError, match=r"manifest\.json: .*choose an empty work directory"):
            Workdir.open(work.root, job)
    assert path.read_bytes() == before


def test_receipt_records_files_and_data(work: Workdir) -> None:
    path = done_unit(work, "measure/layer-003/experts-0000")
    receipt = work.receipt("measure/layer-003/experts-0000")
    assert receipt is not None and receipt["data"] == {"error": 1e-05}
    assert receipt["files"] == [{"path": path.relative_to(work.root).as_posix(), "size": path.stat().st_size,
                                 "sha256": sha256_file(path)}]  # fmt: skip
    other = work.path("x.json")
    other.write_text("{}")
    work.commit("plan", [other], {})
    assert work.receipt("plan")["files"][0]["sha256"] == sha256_file(other)
    assert work.units() == ["measure/layer-003/experts-0000", "plan"]
    assert work.receipt("measure/layer-004") is None


@pytest.mark.parametrize("size", [0, 17])
def test_truncated_file_is_redone_alone(work: Workdir, size: int) -> None:  # case 60
    cut, kept = done_unit(work, "layer-000"), done_unit(work, "layer-001")
    os.truncate(cut, size)
    assert [unit for unit in work.units() if work.receipt(unit) is None] == ["layer-000"]
    kept.unlink()
    assert work.receipt("layer-001") is None
    done_unit(work, "layer-000")
    assert work.receipt("layer-000") is not None


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"unit": "layer-001", "files": [], "data": {}}',
    '{"unit": "layer-000", "files": [{"path": "../x", "size": 1}], "data": {}}',
    '{"unit": "layer-000", "files": [3], "data": {}}', '{"unit": "layer-000", "files": [], "data": []}',
])  # fmt: skip
def test_damaged_receipt_means_redo(work: Workdir, text: str) -> None:
    done_unit(work, "layer-000")
    (work.root / "receipts" / "layer-000.json").write_text(text)
    assert work.receipt("layer-000") is None


def test_changed_bytes_of_equal_size_are_caught_on_loading(work: Workdir) -> None:
    path = done_unit(work, "layer-000")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    receipt = work.receipt("layer-000")
    assert receipt is not None
    with pytest.raises(ResumeError, match="SHA-256"):
        load_tensors(path, receipt["files"][0]["sha256"])


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "", "a//b", ".hidden", "a\0b", "a\n"])
def test_names_cannot_leave_the_directory(work: Workdir, name: str) -> None:  # case 103
    for use in (work.path, work.receipt, lambda unit: work.commit(unit, [], {})):
        with pytest.raises(ResumeError, match="no legal name"):
            use(name)


def test_second_driver_is_told_who_holds_the_lock(work: Workdir) -> None:
    with work.lock():
        with pytest.raises(ResumeError, match=f"in use by process {os.getpid()} on "), work.lock():
            pass
    with work.lock():
        pass


HOLDER = """
import sys, time
from pathlib import Path
from keys35.files.ledger import Workdir, held
from keys35.report.measured import making
with Workdir.open(Path(sys.argv[1]), None).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_dies_with_its_process_and_leftovers_are_swept(work: Workdir) -> None:
    command = [sys.executable, "-c", HOLDER, str(work.root)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(ResumeError, match=f"process {holder.pid} on "), work.lock():
        pass
    leftover = work.path("units", "w.safetensors").with_suffix(".safetensors.partial")
    leftover.parent.mkdir()
    leftover.write_bytes(b"half")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with work.lock():
        assert not leftover.exists()


def test_of_two_jobs_that_begin_at_once_in_one_directory_one_goes_on(tmp_path: Path) -> None:
    """Both found no manifest; the later one's stands, and the earlier one must not fill the directory for it."""
    first = Workdir.open(tmp_path / "work", JOB)
    (first.root / "manifest.json").unlink()
    second = Workdir.open(tmp_path / "work", {**JOB, "version": "0.2.0"})
    with pytest.raises(ResumeError, match=r'another job.*(?s:.*)version: "0.2.0" -> "0.1.0"'), first.lock():
        pass
    with second.lock(), pytest.raises(ResumeError, match="in use"), second.lock():
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_not_in_use(work: Workdir, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ResumeError, match=f"cannot lock files .{os.strerror(code)}.*another disk"), work.lock():
        pass


def test_log_lines_carry_utc_time_and_a_torn_line_is_left_out(work: Workdir) -> None:
    work.log("start", layer=3)
    work.log("end", error=1e-05)
    with open(work.root / "log.jsonl", "a") as file:
        file.write('{"time": "2026-')
    events = work.events()
    assert [event["event"] for event in events] == ["start", "end"]
    assert all(event["time"].endswith("+00:00") for event in events)
    assert events[1]["error"] == 1e-05
    work.log("resumed")
    assert [event["event"] for event in work.events()] == ["start", "end", "resumed"]
    whole = (work.root / "log.jsonl").read_bytes()
    work.log("timed", seconds={"reading": 0.5})
    for size in range(len(whole) + 1, (work.root / "log.jsonl").stat().st_size - 1):
        os.truncate(work.root / "log.jsonl", size)
        assert len(work.events()) == 3, "also where it was cut behind an inner bracket"
        with open(work.root / "log.jsonl", "wb") as file:
            file.write(whole)
        work.log("timed", seconds={"reading": 0.5})


UNITS = """
import sys
from pathlib import Path
import torch
from keys35.files.atomic import save_tensors
from keys35.files.ledger import Workdir, held
from keys35.report.measured import making
work = Workdir.open(Path(sys.argv[1]), {"job": 1})
with work.lock():
    print("ready", flush=True)
    for number in range(int(sys.argv[2])):
        unit = f"layer-{number:03d}"
        if work.receipt(unit) is None:
            path = work.path("units", unit + ".safetensors")
            digest = save_tensors(path, {"w": torch.full((4096,), float(number))})
            work.commit(unit, {path: digest}, {"n": number})
"""


def files_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and path.name != "lock"}  # fmt: skip


ODD_LINES = (
    b'{"event": "captured"}', b'{"time": "2026-11-30T18:00:00+00:00"}', b'{"time": "noon", "event": "captured"}',
    b'{"time": 3, "event": "captured"}', b"3", b"null", b"\xff\x00",
)  # fmt: skip


@pytest.mark.parametrize("line", ODD_LINES)
def test_a_line_that_is_no_event_with_a_time_is_passed_over(work: Workdir, line: bytes) -> None:
    """A report of the work directory ended in a KeyError."""
    work.log("started")
    with open(work.root / "log.jsonl", "ab") as file:
        file.write(line + b"\n")
    work.log("captured")
    assert [event["event"] for event in work.events()] == ["started", "captured"]
    assert list(making(work)["seconds"]) == ["calibration passes"]


def test_a_full_disk_is_named_by_who_cannot_lock_a_folder(work: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    """"No space left on device" named none."""
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("keys35.files.ledger.os.write", full)
    with pytest.raises(ResumeError, match=f"{work.root}: disk full, not even its lock"), held(work.root):
        pass
    monkeypatch.undo()
    with held(work.root):
        pass


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:  # case 59
    command = [sys.executable, "-c", UNITS]
    quiet = {"check": True, "cwd": REPO, "stdout": subprocess.DEVNULL}
    subprocess.run([*command, str(tmp_path / "whole"), "60"], **quiet)
    for delay in (0.002, 0.01, 0.03, 0.07):
        cut = [*command, str(tmp_path / "cut"), "60"]
        process = subprocess.Popen(cut, stdout=subprocess.PIPE, cwd=REPO)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for path in (tmp_path / "cut" / "receipts").rglob("*.json"):
            assert json.loads(path.read_text())["unit"] == path.stem
    subprocess.run([*command, str(tmp_path / "cut"), "60"], **quiet)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
