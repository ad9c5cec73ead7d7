"""Streamed shards and their index: stock libraries read them, and wrong bytes never get a final name."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import some_tensors
from safetensors.torch import load_file

from keys35.errors import PlanError
from keys35.files.atomic import sha256_file, tensor_bytes
from keys35.files.headers import SAFETENSORS_NAME, read_header
from keys35.files.shards import ShardReceipt, TensorSpec, shard_name, write_index, write_shard
from keys35.files.source import ShardedSource

REPO = Path(__file__).parents[2]


def spec(name: str, tensor: torch.Tensor, read: Callable[[], bytes] | None = None) -> TensorSpec:
    produce = read or (lambda: tensor_bytes(tensor).tobytes())
    return TensorSpec(name, SAFETENSORS_NAME[tensor.dtype], tuple(tensor.shape), produce)


def test_shard_is_read_by_the_stock_library_in_the_order_given(tmp_path: Path) -> None:  # case 89
    tensors = dict(reversed(some_tensors().items()))
    path = tmp_path / shard_name(2, 81)
    receipt = write_shard(path, [spec(name, tensor) for name, tensor in tensors.items()])
    assert path.name == receipt.file == "model-00002-of-00081.safetensors"
    assert (receipt.size, receipt.sha256) == (path.stat().st_size, sha256_file(path))
    assert receipt.tensors == tuple(tensors)
    assert receipt.tensor_bytes == sum(tensor.nbytes for tensor in tensors.values())
    header = read_header(path)
    assert list(header.entries) == list(tensors) and header.data_start % 8 == 0
    assert header.metadata == {"format": "pt"}
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert os.listdir(tmp_path) == [path.name]


def test_shards_with_an_index_open_as_a_checkpoint(tmp_path: Path) -> None:
    receipts = [write_shard(tmp_path / shard_name(number, 2), [spec(f"t.{number}", torch.ones(number))])
                for number in (1, 2)]
    write_index(tmp_path / "model.safetensors.index.json", receipts, 12)
    (tmp_path / "config.json").write_text("{}")
    assert set(ShardedSource.open(tmp_path).tensors) == {"t.1", "t.2"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 12}


@pytest.mark.parametrize("data", [b"", bytes(15), bytes(17)])
def test_wrong_number_of_bytes_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PlanError, match=rf"w is F32 \[4\], 16 bytes, but {len(data)} were produced"):
        write_shard(tmp_path / "x", [spec("v", torch.ones(2)), spec("w", torch.ones(4), lambda: data)])
    assert os.listdir(tmp_path) == []


def test_failing_producer_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "x", [spec("v", torch.ones(2)), spec("w", torch.ones(4), fail)])
    assert os.listdir(tmp_path) == []


def test_layouts_that_readers_cannot_map_are_refused(tmp_path: Path) -> None:
    odd = spec("odd", torch.ones(1, dtype=torch.int16))
    with pytest.raises(PlanError, match=r"wide \(F32\) would start unaligned"):
        write_shard(tmp_path / "x", [odd, spec("wide", torch.ones(1))])
    with pytest.raises(PlanError, match="odd would be written twice"):
        write_shard(tmp_path / "x", [odd, odd])
    with pytest.raises(PlanError, match="dtype 'F31'"):
        write_shard(tmp_path / "x", [TensorSpec("w", "F31", (1,), bytes)])
    assert os.listdir(tmp_path) == []


def test_index_refuses_contradictions(tmp_path: Path) -> None:
    first, second = (ShardReceipt(shard_name(n, 2), 20, "0" * 64, (f"t.{n}",), 8) for n in (1, 2))
    with pytest.raises(PlanError, match="hold 16 bytes of tensors, the plan says 15"):
        write_index(tmp_path / "index.json", [first, second], 15)
    with pytest.raises(PlanError, match="t.1 lies in both"):
        write_index(tmp_path / "index.json", [first, first], 16)
    assert os.listdir(tmp_path) == []


STREAM = """
import resource, sys
from pathlib import Path
from keys35.files.shards import TensorSpec, write_shard
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
size = 64 << 20
specs = [TensorSpec(f"t.{n}", "U8", (size,), lambda: bytes(size)) for n in range(8)]
print(write_shard(Path(sys.argv[1]), specs).size)
"""


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:  # case 70: 512 MiB shard, 64 MiB tensors
    base = subprocess.run(
        [sys.executable, "-c", "import keys35.files.shards; print(open('/proc/self/status').read())"],
        capture_output=True, text=True, check=True, cwd=REPO).stdout  # fmt: skip
    used = next(int(line.split()[1]) << 10 for line in base.splitlines() if line.startswith("VmData"))
    limit = used + (160 << 20)
    assert resource.getrlimit(resource.RLIMIT_DATA)[1] in (resource.RLIM_INFINITY, limit)
    done = subprocess.run([sys.executable, "-c", STREAM, str(tmp_path / "x"), str(limit)],
                          capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 512 << 20
