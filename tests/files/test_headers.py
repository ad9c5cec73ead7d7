"""Strict headers: every malformed file of failure case 101, and 13, 14, 99, is refused by name."""

import json
import os
from pathlib import Path

import pytest
import torch
from builders import some_tensors, write_raw_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from keys35.errors import SourceError
from keys35.files.headers import DTYPE_BITS, TORCH_DTYPE, pack_header, read_header, tensor_nbytes

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def two(first: tuple[int, int], second: tuple[int, int]) -> dict[str, object]:
    return {name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
            for name, (start, stop) in (("a", first), ("b", second))}


MALFORMED: dict[str, tuple[object, bytes, int | None, str]] = {
    "length negative": (GOOD, bytes(8), -5, "header length"),
    "length zero": (GOOD, bytes(8), 0, "header length"),
    "length above 100 MB": (GOOD, bytes(8), 100_000_001, "header length"),
    "length huge": (GOOD, bytes(8), 2**62, "header length"),
    "header longer than the file": (GOOD, bytes(8), 5000, "needs 5008 bytes for its header"),
    "array": ([1], b"", None, "JSON list"),
    "number": ("12", b"", None, "JSON int"),
    "not JSON": ("{a}", b"", None, "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "not JSON"),
    "deeply nested": ("[" * 200_000, b"", None, "not JSON"),
    "bytes after the object": (json.dumps(GOOD) + "}", bytes(8), None, "not JSON"),
    "true in a shape": (entry(shape=[True, 2]), bytes(8), None, "shape"),
    "true as an offset": (entry(data_offsets=[False, 8]), bytes(8), None, "data_offsets"),
    "float in a shape": (entry(shape=[2.0]), bytes(8), None, "shape"),
    "negative size": (entry(shape=[-2]), bytes(8), None, "shape"),
    "shape is text": (entry(shape="2"), bytes(8), None, "shape"),
    "negative offset": (entry(data_offsets=[-8, 0]), bytes(8), None, "data_offsets"),
    "reversed offsets": (entry(data_offsets=[8, 0]), bytes(8), None, "claims bytes"),
    "three offsets": (entry(data_offsets=[0, 4, 8]), bytes(8), None, "data_offsets"),
    "offset past 64 bits": (entry(data_offsets=[0, 2**70]), bytes(8), None, "data_offsets"),
    "offsets past the end": (entry(shape=[4], data_offsets=[0, 16]), bytes(8), None, "truncated: needs"),
    "size is not shape times dtype": (entry(shape=[3]), bytes(8), None, "claims bytes"),
    "product overflows": (entry(shape=[2**61, 8, 0, 1], data_offsets=[0, 8]), bytes(8), None, "claims bytes"),
    "unknown dtype": (entry(dtype="F31"), bytes(8), None, "unknown dtype"),
    "dtype is a list": (entry(dtype=["F32"]), bytes(8), None, "unknown dtype"),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), None, "lacks exactly"),
    "extra field": (entry(path="/etc/passwd"), bytes(8), None, "lacks exactly"),
    "entry is a number": ({"a": 3}, b"", None, "lacks exactly"),
    "metadata is a list": ({"__metadata__": []}, b"", None, "__metadata__"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", None, "__metadata__"),
    "internal key": ({"__class__": GOOD["a"]}, bytes(8), None, "illegal tensor name"),
    "empty name": ({"": GOOD["a"]}, bytes(8), None, "illegal tensor name"),
    "NUL in a name": ({"a\0b": GOOD["a"]}, bytes(8), None, "illegal tensor name"),
    "overlap": (two((0, 8), (4, 12)), bytes(12), None, "overlaps"),
    "hole": (two((0, 4), (8, 12)), bytes(12), None, "hole"),
    "hole at the start": (entry(data_offsets=[4, 12]), bytes(12), None, "hole"),
    "duplicate key": ('{"a":%s,"a":%s}' % ((json.dumps(GOOD["a"]),) * 2), bytes(8), None, "twice"),
    "duplicate field": ('{"a":{"dtype":"F32","dtype":"F32"}}', b"", None, "twice"),
    "bytes after the data": (GOOD, bytes(9), None, "after its last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_header_is_refused_by_file_name(tmp_path: Path, case: str) -> None:
    header, data, length, message = MALFORMED[case]
    path = write_raw_shard(tmp_path / "model-00001.safetensors", header, data, length)
    with pytest.raises(SourceError, match=r"model-00001\.safetensors.*" + message):
        read_header(path)


def test_truncated_shard_tells_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"w": torch.zeros(4096)}, path)
    size = path.stat().st_size
    os.truncate(path, size - 1024)
    with pytest.raises(SourceError, match=f"needs {size} bytes, file has {size - 1024}"):
        read_header(path)


@pytest.mark.parametrize("data, message", [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\n", "Git LFS pointer"),
    (b"", "empty"),
    (b"abc", "only 3 bytes"),
])  # fmt: skip
def test_not_a_shard_at_all(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message):
        read_header(path)


def test_fifo_device_folder_and_missing_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    for path in (tmp_path / "fifo.safetensors", tmp_path, Path("/dev/zero")):
        with pytest.raises(SourceError, match="not a regular file"):
            read_header(path)
    with pytest.raises(SourceError, match="cannot be opened"):
        read_header(tmp_path / "absent.safetensors")


def test_agrees_with_the_stock_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = some_tensors()
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    data = path.read_bytes()
    with safe_open(path, "pt") as stock:
        assert set(header.entries) == set(stock.keys())
    for name, found in header.entries.items():
        assert (found.shape, TORCH_DTYPE[found.dtype]) == (tuple(tensors[name].shape), tensors[name].dtype)
        assert found.numel == tensors[name].numel()
        flat = tensors[name].reshape(-1).view(torch.uint8)
        assert data[found.start : found.end] == flat.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_format_is_understood(tmp_path: Path, dtype: str) -> None:
    size = tensor_nbytes(dtype, [8])
    header = {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}
    assert read_header(write_raw_shard(tmp_path / "x", header, bytes(size))).entries["a"].nbytes == size


def test_packed_header_is_padded_and_read_back(tmp_path: Path) -> None:
    layout = [("b", "F32", (2, 3)), ("a", "I32", ()), ("c", "I16", (0, 4))]
    packed = pack_header(layout, {"who": "us"})
    assert len(packed) % 8 == 0
    path = tmp_path / "x"
    path.write_bytes(packed + bytes(28))
    header = read_header(path)
    assert header.metadata == {"who": "us"}
    assert {(e.name, e.dtype, e.shape) for e in header.entries.values()} == set(layout)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 20))
def test_a_damaged_byte_is_refused_or_still_consistent(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
) -> None:
    data = bytearray(save({"w": torch.arange(6.0), "v": torch.ones(2, 2, dtype=torch.int16)}))
    data[position % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(data[: len(data) - cut])
    try:
        header = read_header(path)
    except SourceError as error:
        assert "damaged.safetensors" in str(error)
    else:
        assert sum(found.nbytes for found in header.entries.values()) == header.size - header.data_start
