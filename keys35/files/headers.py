"""Safetensors headers, read strictly: every number is checked before it is used as a size or an offset.

A shard is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes without holes.
Nothing here reads tensor data, so opening hundreds of shards costs a few milliseconds each.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from keys35.errors import IncompleteError, SourceError

MAX_HEADER_BYTES = 100_000_000
DOWNLOAD = "download it again"
LFS_MAGIC = b"version https://git-lfs"
CONTROL = (".aria2", ".st")  # files that aria2 and axel keep beside one whose segments they fill in any order

# Bits per element of every dtype the safetensors format names, also those torch cannot hold.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

TORCH_DTYPE: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
SAFETENSORS_NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPE.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are absolute byte offsets in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One shard's table of contents, in the order of the data; sizes in bytes."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    size: int
    data_start: int
    digest: str
    """SHA-256 of the length field and the header."""


def read_header(path: Path) -> ShardHeader:
    """Read and check one shard's header without touching tensor data.

    Raises SourceError, naming the file, for anything but a complete, regular, well-formed safetensors file.
    """
    path = Path(path)
    _refuse_filling(path)
    size, prefix, raw = _header_bytes(path)
    table = _parse_object(path, raw)
    metadata = _metadata(path, table.pop("__metadata__", {}))
    data_start = len(prefix) + len(raw)
    entries = sorted((_entry(path, name, info, data_start) for name, info in table.items()),
                     key=lambda entry: (entry.start, entry.end))
    _check_layout(path, entries, data_start, size)
    digest = hashlib.sha256(prefix + raw).hexdigest()
    return ShardHeader(path, {entry.name: entry for entry in entries}, metadata, size, data_start, digest)


def pack_header(layout: Iterable[tuple[str, str, Sequence[int]]], metadata: dict[str, str]) -> bytes:
    """Return the length field and header for tensors (name, dtype, shape) laid out in the order given.

    The header is padded with spaces so that the data starts 8-aligned.
    """
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape in layout:
        end = offset + tensor_nbytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this safetensors dtype and shape (sub-byte types round up)."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def read_exact(fd: int, path: Path, start: int, buffer: memoryview) -> None:
    """Fill `buffer` from byte `start` of an open file; SourceError when the file ends first."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], start + done)
        if got == 0:
            _ends_early(path, start + done, start + len(buffer))
        done += got


def read_range(fd: int, path: Path, start: int, count: int) -> bytes:
    """Bytes `start` to `start + count` of an open file, with no second copy up to 2 GiB."""
    pieces, done = [], 0
    while done < count:
        piece = os.pread(fd, count - done, start + done)
        if not piece:
            _ends_early(path, start + done, start + count)
        pieces.append(piece)
        done += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _ends_early(path: Path, position: int, promised: int) -> NoReturn:
    _refuse(path, f"ends at byte {position}, {promised} were promised", DOWNLOAD)


def open_regular(path: Path) -> int:
    """Open a regular file and return its descriptor; a FIFO or a device is refused, never waited on."""
    try:
        # Asked before opening: opening a FIFO blocks and opening a device can act.
        if not stat.S_ISREG(os.stat(path).st_mode):
            _refuse(path, "is not a regular file", "replace it by the real file")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be opened ({error}); check that it was downloaded") from error


def _refuse(path: Path, found: str, remedy: str = "this is not a usable safetensors file") -> NoReturn:
    raise (IncompleteError if remedy == DOWNLOAD else SourceError)(f"{path}: {found}; {remedy}")


def _refuse_filling(path: Path) -> None:
    """Such a file has its full length, and often its header, while there are holes where its tensors will be."""
    for suffix in CONTROL:
        if path.with_name(path.name + suffix).exists():
            raise IncompleteError(f"{path}: is still being downloaded, {path.name}{suffix} lies beside it; finish the "
                                  "download, or wait for it with --wait")


def _header_bytes(path: Path) -> tuple[int, bytes, bytes]:
    """Return the file's size, its 8-byte length field and the header, all read for real."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            _refuse(path, "is empty (0 bytes)", DOWNLOAD)
        prefix = os.pread(fd, 8, 0)
        if os.pread(fd, len(LFS_MAGIC), 0) == LFS_MAGIC:
            _refuse(path, "is a Git LFS pointer, not the file itself", "fetch it with `git lfs pull`")
        if len(prefix) < 8:
            _refuse(path, f"has only {size} bytes, too few for a header", DOWNLOAD)
        length = int.from_bytes(prefix, "little", signed=True)
        if not 2 <= length <= MAX_HEADER_BYTES:
            _refuse(path, f"has a header length of {length} bytes, legal are 2 to {MAX_HEADER_BYTES}")
        if 8 + length > size:
            _refuse(path, f"needs {8 + length} bytes for its header, file has {size}", DOWNLOAD)
        return size, prefix, read_range(fd, path, 8, length)
    finally:
        os.close(fd)


def _parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = sorted({key for key, _ in pairs if key in seen or seen.add(key)})
            _refuse(path, f"names {twice[:5]} twice in its header")
        return table

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"has a header that is not JSON ({type(error).__name__}: {str(error)[:120]})")
    if not isinstance(table, dict):
        _refuse(path, f"has a header that is a JSON {type(table).__name__}, not an object")
    return table


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "has __metadata__ that is not a map from text to text")
    return metadata


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62  # `type`, because True is an int too


def _entry(path: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    """Check one header entry by itself and give it absolute offsets."""
    if not name or name.startswith("__") or not name.isprintable():
        _refuse(path, f"has an illegal tensor name {name!r}")
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"{name!r} lacks exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(path, f"{name!r} has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        _refuse(path, f"{name!r} has shape {shape!r}, not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _refuse(path, f"{name!r} has data_offsets {offsets!r}, not two offsets")
    start, end = offsets
    need = math.prod(shape) * DTYPE_BITS[dtype]
    if start > end or (end - start) * 8 != need:
        _refuse(path, f"{name!r} claims bytes {start} to {end}, {dtype} {shape} takes {need / 8:g}")
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + end)


def _check_layout(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    """The data must be covered exactly once and end where the file ends."""
    position = data_start
    for entry in entries:
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a hole before it"
            _refuse(path, f"{entry.name!r} {what} (byte {entry.start}, expected {position})")
        position = entry.end
    if position > size:
        _refuse(path, f"is truncated: needs {position} bytes, file has {size}", DOWNLOAD)
    if position < size:
        _refuse(path, f"has bytes after its last tensor: needs {position}, file has {size}")
