"""Writers leave complete files or none, whatever interrupts them."""

import hashlib
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
from builders import some_tensors
from safetensors.torch import load_file, save_file

from keys35.errors import PlanError, ResumeError
from keys35.files import atomic
from keys35.files.atomic import (
    free_bytes,
    load_tensors,
    read_json,
    replacing,
    require_space,
    save_tensors,
    sha256_file,
    write_bytes,
    write_json,
)

REPO = Path(__file__).parents[2]


def test_json_round_trips_awkward_numbers(tmp_path: Path) -> None:  # case 67
    value = {"small": 1e-05, "nan": math.nan, "inf": [math.inf, -math.inf], "text": "é\n", "none": None}
    write_json(tmp_path / "a" / "x.json", value)
    back = read_json(tmp_path / "a" / "x.json")
    assert math.isnan(back.pop("nan")) and math.isnan(value.pop("nan"))
    assert back == value


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:-5], lambda d: d + b"x", lambda d: b"\xff\xfe"]
)
def test_damaged_json_names_file_and_remedy(tmp_path: Path, damage: Any) -> None:  # case 66
    path = tmp_path / "job.json"
    write_json(path, {"a": [1, 2, 3]})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ResumeError, match=r"job\.json: is not complete JSON.*delete it and run"):
        read_json(path)
    path.unlink()
    with pytest.raises(ResumeError, match=r"job\.json: is missing; run the same command again"):
        read_json(path)
    path.mkdir()
    with pytest.raises(ResumeError, match=r"job\.json: cannot be read"):
        read_json(path)


def test_failed_write_keeps_the_old_file_and_no_leftover(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_bytes(path, b"old")
    with pytest.raises(RuntimeError), replacing(path, 3) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_leftover_of_a_killed_run_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_bytes(b"a long leftover of a killed run")
    write_bytes(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]


def test_tensors_round_trip_and_bytes_are_deterministic(tmp_path: Path) -> None:
    tensors = some_tensors() | {"flags": torch.tensor([True, False, True]), "empty": torch.empty(0, 4)}
    first = save_tensors(tmp_path / "a.safetensors", tensors, {"unit": "x"})
    second = save_tensors(tmp_path / "b.safetensors", dict(reversed(tensors.items())), {"unit": "x"})
    assert first == second == sha256_file(tmp_path / "a.safetensors")
    assert first == hashlib.sha256((tmp_path / "b.safetensors").read_bytes()).hexdigest()
    for loaded in (load_tensors(tmp_path / "a.safetensors", first), load_file(tmp_path / "a.safetensors")):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_views_and_shared_storage_are_written_as_copies(tmp_path: Path) -> None:  # case 27
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"transposed": base.T, "left": base[:, :3], "right": base[:, 3:], "again": base}
    save_tensors(tmp_path / "x", tensors)
    for name, loaded in load_tensors(tmp_path / "x").items():
        assert torch.equal(loaded, tensors[name])


def test_files_of_the_stock_library_are_read(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "x.safetensors")
    loaded = load_tensors(tmp_path / "x.safetensors", sha256_file(tmp_path / "x.safetensors"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in some_tensors().items())


def test_damaged_tensor_file_is_a_resume_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    digest = save_tensors(path, some_tensors())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    load_tensors(path)  # without the hash nobody can know
    with pytest.raises(ResumeError, match=r"x\.safetensors: SHA-256 is .*recorded was .*delete it"):
        load_tensors(path, digest)
    path.write_bytes(data[:-8])
    with pytest.raises(ResumeError, match=r"x\.safetensors: is truncated.*delete it"):
        load_tensors(path, digest)


def test_space_is_asked_for_first(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "there")
    require_space(tmp_path, 1)
    with pytest.raises(PlanError, match=r"needs \d{20,} bytes, \d+ are free"):
        require_space(tmp_path, free * 10**12)


def test_other_os_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        write_bytes(tmp_path / "file" / "x", b"y")


def test_error_while_syncing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(ResumeError, match=r"disk full, needed 3 bytes, \d+ are free"):
        write_bytes(tmp_path / "x", b"abc")
    assert os.listdir(tmp_path) == []


FULL_DISK = """
import os, sys
from pathlib import Path
import torch
from keys35.errors import ResumeError
from keys35.files.atomic import save_tensors, write_json
root = Path(sys.argv[1])
write_json(root / "kept.json", [1])
try:
    save_tensors(root / "big.safetensors", {"w": torch.zeros(1 << 19)})
except ResumeError as error:
    print(error, sorted(os.listdir(root)))
"""


def test_full_tmpfs_tells_needed_and_free_bytes(tmp_path: Path) -> None:  # case 65
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    command = f"{mount} && exec {sys.executable} - {tmp_path}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], input=FULL_DISK, text=True,
                          capture_output=True, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)})
    assert "disk full, needed 2097" in done.stdout and "are free" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("['kept.json']")


ENDLESS = """
import sys
from pathlib import Path
import torch
from keys35.files.atomic import save_tensors
print("ready", flush=True)
number = 0
while True:
    path = Path(sys.argv[1]) / f"{number % 7}.safetensors"
    save_tensors(path, {"w": torch.full((1 << 18,), float(number))})
    number += 1
"""


def test_kill_at_any_moment_leaves_only_complete_files(tmp_path: Path) -> None:  # case 59, 60
    for delay in (0.003, 0.02, 0.05, 0.11):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        finished = [path for path in tmp_path.iterdir() if path.suffix != ".partial"]
        for path in finished:
            values = load_tensors(path)["w"]
            assert (values == values[0]).all()
    assert finished
