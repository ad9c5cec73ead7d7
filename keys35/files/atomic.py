"""The only writer of bytes: a file appears under its final name complete, or not at all.

Every file is written beside its final name with the suffix ".partial", synced, then renamed, so that a kill
at any moment leaves finished files and at most one leftover, which the next write of that name replaces.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from keys35.errors import Keys35Error, PlanError, ResumeError, SourceError
from keys35.files.hashed import Hashed
from keys35.files.headers import (
    DTYPE_BITS,
    SAFETENSORS_NAME,
    TORCH_DTYPE,
    open_regular,
    pack_header,
    read_exact,
    read_header,
    tensor_nbytes,
)

PARTIAL = ".partial"
CHUNK_BYTES = 1 << 23
DROP_CACHE_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
REDO = "delete it and run the same command again, the unit it belongs to is redone"


_writer = ""


def write_as(writer: str) -> None:
    """Give this process's unfinished files names of their own: a worker that was thought dead may write the same."""
    global _writer
    _writer = f".{writer}"


def sha256_file(path: Path) -> str:
    """SHA-256 of a file as lower-case hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Bytes still free on the disk that holds `path` or its nearest existing parent."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def require_space(path: Path, needed: int) -> None:
    """PlanError with both numbers unless `needed` bytes fit on the disk that holds `path`."""
    free = free_bytes(path)
    if free < needed:
        raise PlanError(f"{path}: needs {needed} bytes, {free} are free; free space or choose another disk")


def make_folder(folder: Path, refusal: type[Keys35Error]) -> None:
    """Make a folder and those above it; raises `refusal` where something else has its name or that of one above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise refusal(f"{folder}: is no folder, or lies below a file; choose another path") from None


@contextmanager
def replacing(path: Path, needed: int) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends well and vanishes when it does not.

    `needed` is the number of bytes about to be written, for the message when the disk is full (ResumeError).
    """
    path = Path(path)
    partial = path.with_name(path.name + _writer + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise ResumeError(
                f"{path}: disk full, needed {needed} bytes, {free_bytes(path.parent)} are free; nothing was "
                "left under this name: free space and run the same command again, finished work is kept"
            ) from error
        raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file atomically."""
    with replacing(path, len(data)) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, keys in the order given; NaN and infinities survive `read_json`."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path, error: type[Keys35Error] = ResumeError, remedy: str = REDO) -> Any:
    """Read a whole JSON file; raises `error` with `remedy` if it is missing, cut, or has bytes after it."""
    if not os.path.lexists(path):
        raise error(f"{path}: is missing; {remedy.removeprefix('delete it and ')}")
    try:
        fd = open_regular(path)
        with os.fdopen(fd, "rb") as file:
            return json.loads(file.read().decode())
    except (SourceError, OSError) as cause:
        raise error(f"{path}: cannot be read ({cause}); {remedy}") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: is not complete JSON ({cause}); {remedy}") from cause


@dataclass(frozen=True, slots=True)
class Saved:
    """What a receipt records of a file whose tensors are read one by one: SHA-256 of all, of its header, of each."""

    sha256: str
    header: str
    tensors: dict[str, str]


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> str:
    """Write tensors as one safetensors file atomically and return its SHA-256.

    Views and tensors that share memory are written as separate contiguous copies; wide dtypes come first,
    then names in order, so that every tensor is aligned and the same input gives the same bytes.
    """
    return write_safetensors(path, *_laid_out(tensors), metadata or {})[1]


def save_pieces(path: Path, tensors: Mapping[str, torch.Tensor]) -> Saved:
    """The same for tensors that are later read one by one, each of which gets a hash of its own."""
    return write_pieces(path, *_laid_out(tensors))


def write_pieces(
    path: Path, layout: Sequence[tuple[str, str, tuple[int, ...]]], contents: Iterable[memoryview]
) -> Saved:
    """Stream tensors (name, dtype, shape) and their bytes into a file whose tensors are later read one by one."""
    each: dict[str, str] = {}
    digest = write_safetensors(path, layout, contents, {}, each)[1]
    return Saved(digest, read_header(path).digest, each)


def tensors_layout(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of tensors in the order in which they are saved."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return [(name, SAFETENSORS_NAME[tensors[name].dtype], tuple(tensors[name].shape)) for name in order]


def _laid_out(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[tuple[str, str, tuple[int, ...]]], Iterator[memoryview]]:
    layout = tensors_layout(tensors)
    return layout, (tensor_bytes(tensors[name]) for name, _, _ in layout)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's little-endian bytes in row-major order; no copy if it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


Contents = bytes | memoryview | Iterator[memoryview]
"""A tensor's bytes, at once or in pieces."""


def write_safetensors(
    path: Path,
    layout: Sequence[tuple[str, str, tuple[int, ...]]],
    contents: Iterable[Contents],
    metadata: dict[str, str],
    each: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Stream tensors (name, dtype, shape) and their bytes into one file; return its size and SHA-256.

    `contents` is consumed one piece at a time; `each` is filled with every tensor's SHA-256. PlanError for
    duplicate names, a tensor that would not be aligned to its element size in this order, or bytes that do not
    match their shape.
    """
    _check_layout(path, layout)
    header = pack_header(layout, metadata)
    size = len(header) + sum(tensor_nbytes(dtype, shape) for _, dtype, shape in layout)
    with replacing(path, size) as file, Hashed(file) as out:
        out.write(header)
        for (name, dtype, shape), data in zip(layout, contents, strict=True):
            need, done, own = tensor_nbytes(dtype, shape), 0, None if each is None else hashlib.sha256()
            for piece in _pieces(data):
                out.write(piece, own)
                done += len(piece)
            if done != need:
                raise PlanError(f"{path}: {name} is {dtype} {list(shape)}, {need} bytes, but {done} "
                                "were produced; nothing was written under this name")
            if own is not None:
                out.wait()
                each[name] = own.hexdigest()
        out.wait()
    return size, out.digest.hexdigest()


def _pieces(data: Contents) -> Iterator[memoryview]:
    """A tensor's bytes in pieces of at most CHUNK_BYTES."""
    for part in data if isinstance(data, Iterator) else [data]:
        view = memoryview(part).cast("B")
        yield from (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))


def read_pieces(fd: int, path: Path, start: int, count: int) -> Iterator[memoryview]:
    """Bytes `start` to `start + count` of an open file in pieces of at most CHUNK_BYTES; read pages are dropped."""
    for first in range(start, start + count, CHUNK_BYTES):
        view = memoryview(bytearray(min(CHUNK_BYTES, start + count - first)))
        read_exact(fd, path, first, view)
        yield view
    if count >= DROP_CACHE_BYTES:
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)


def _check_layout(path: Path, layout: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    seen: set[str] = set()
    offset = 0
    for name, dtype, shape in layout:
        if name in seen:
            raise PlanError(f"{path}: {name} would be written twice; give every tensor one place")
        if dtype not in DTYPE_BITS:
            raise PlanError(f"{path}: {name} has dtype {dtype!r}, which safetensors does not know")
        if offset * 8 % DTYPE_BITS[dtype]:
            raise PlanError(f"{path}: {name} ({dtype}) would start unaligned; put wider dtypes first")
        seen.add(name)
        offset += tensor_nbytes(dtype, shape)


def load_tensors(path: Path, expect_sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Read every tensor of one of our own files into memory, checking the file's hash on the way if given.

    Raises ResumeError, naming the file and the way out, if it is damaged or not the file that was recorded.
    """
    try:
        tensors, digest = _read_all(Path(path), hashing=expect_sha256 is not None)
    except SourceError as cause:
        raise ResumeError(f"{cause}; {REDO}") from cause
    if expect_sha256 is not None and digest != expect_sha256:
        raise ResumeError(f"{path}: SHA-256 is {digest}, recorded was {expect_sha256}; {REDO}")
    return tensors


def _read_all(path: Path, hashing: bool) -> tuple[dict[str, torch.Tensor], str]:
    header = read_header(path)
    tensors: dict[str, torch.Tensor] = {}
    fd = open_regular(path)
    try:
        start = bytearray(header.data_start)
        read_exact(fd, path, 0, memoryview(start))
        digest = hashlib.sha256(start)
        with ThreadPoolExecutor(1) as beside:  # hashes, in order, what has been read
            for entry in header.entries.values():  # in data order without holes, so this hashes the whole file
                if entry.dtype not in TORCH_DTYPE:
                    raise SourceError(f"{path}: {entry.name} has dtype {entry.dtype}, which torch cannot hold")
                flat = torch.empty(entry.nbytes, dtype=torch.uint8)
                whole = memoryview(flat.numpy())
                for first in range(0, entry.nbytes, CHUNK_BYTES):
                    piece = whole[first : first + CHUNK_BYTES]
                    read_exact(fd, path, entry.start + first, piece)
                    if hashing:
                        beside.submit(digest.update, piece)
                tensors[entry.name] = flat.view(TORCH_DTYPE[entry.dtype]).reshape(entry.shape)
    finally:
        os.close(fd)
    return tensors, digest.hexdigest()
