"""A checkpoint on disk: its index, its shards' headers, and reads of single tensors or slices.

Opening looks at headers only and refuses every disagreement between index and shards before any work starts.
Files are opened, read and closed again, so 282 shards never hold 282 handles.
"""

import hashlib
import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from keys35.errors import SourceError
from keys35.files.atomic import (
    CHUNK_BYTES,
    DROP_CACHE_BYTES,
    PARTIAL,
    read_json,
    read_pieces,
    sha256_file,
    tensor_bytes,
)
from keys35.files.fp8 import dequantize, pair_scales
from keys35.files.headers import (
    TORCH_DTYPE,
    ShardHeader,
    TensorEntry,
    open_regular,
    read_exact,
    read_header,
    read_range,
)
from keys35.files.index import AGAIN, check_agreement, check_files, read_headers, read_weight_map, some
from keys35.files.shards import INDEX_NAME

SINGLE_NAME = "model.safetensors"
WHOLE_HASH_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
PINNED_BYTES = 1 << 20, 1 << 28  # a larger one passes once, and pinned memory is kept for the next
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
WEIGHTS = PICKLES | {".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", PARTIAL}
NOT_CARRIED = {"config.json", "quantization_config.json"}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor and the shard file that holds it.

    `entry` is what readers get: of an FP8 weight that is BF16, while `stored` and `scale` are what the files hold.
    """

    file: Path
    entry: TensorEntry
    stored: TensorEntry | None = None
    scale: "SourceTensor | None" = None


@dataclass(slots=True)
class ShardedSource:
    """A folder of safetensors shards with `model.safetensors.index.json`, or one `model.safetensors`."""

    root: Path
    config: dict[str, Any]
    shards: tuple[ShardHeader, ...]
    fp8: bool = False
    tensors: dict[str, SourceTensor] = field(init=False, repr=False)
    total_size: int = field(init=False)
    bytes_read: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tensors = {name: SourceTensor(shard.path, entry)
                        for shard in self.shards for name, entry in shard.entries.items()}
        self.total_size = sum(tensor.entry.nbytes for tensor in self.tensors.values())
        if self.fp8:
            self._join_scales()

    def _join_scales(self) -> None:
        """FP8 weights become BF16 ones that know their scales, which are tensors no longer."""
        entries = {name: tensor.entry for name, tensor in self.tensors.items()}
        for name, scale in pair_scales(self.root, entries, self.config).items():
            held, stored = self.tensors[name], entries[name]
            entry = replace(stored, dtype="BF16", end=stored.start + 2 * stored.numel)
            self.tensors[name] = SourceTensor(held.file, entry, stored, self.tensors.pop(scale))

    @classmethod
    def open(cls, root: Path, fp8: bool | None = False) -> "ShardedSource":
        """Open a checkpoint from headers alone; fp8: whether its weights are FP8, None if either will do.

        Raises SourceError for missing, truncated, unlisted or malformed shards, an index that disagrees with
        them, names that are not plain file names, pickled weights, and FP8 weights unless `fp8` asks for them;
        which lists them, if shards are still to be downloaded.
        """
        root = Path(root)
        if not root.is_dir():
            raise SourceError(f"{root}: is not a folder; give the one that holds config.json and the shards")
        config = _read_object(root / "config.json")
        index = _read_object(root / INDEX_NAME) if os.path.lexists(root / INDEX_NAME) else None
        if index is None:
            shards: tuple[ShardHeader, ...] = (_only_shard(root),)
        else:
            weight_map = read_weight_map(root / INDEX_NAME, index)
            files = sorted(set(weight_map.values()))
            check_files(root, files)
            shards = read_headers(root, files)
            check_agreement(root, shards, weight_map, index.get("metadata"))
        if fp8 is None:
            fp8 = any(entry.dtype.startswith("F8_") for shard in shards for entry in shard.entries.values())
        source = cls(root, config, shards, fp8)
        if not fp8:
            _refuse_fp8(source)
        return source

    def read(self, name: str, pinned: bool = False) -> torch.Tensor:
        """Read one tensor in its stored dtype and shape (FP8 as BF16) into memory of its own.

        pinned: memory from which a GPU fetches at full speed, unless the tensor is so small or so large that it does
        not pay.
        """
        return self._read(self._find(name), pinned)

    def _read(self, tensor: SourceTensor, pinned: bool = False) -> torch.Tensor:
        if tensor.stored and tensor.scale:
            return dequantize(self._read(SourceTensor(tensor.file, tensor.stored)), self._read(tensor.scale))
        pinned = pinned and PINNED_BYTES[0] <= tensor.entry.nbytes <= PINNED_BYTES[1]
        flat = torch.empty(tensor.entry.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._fill(tensor, [tensor.entry.start], memoryview(flat.numpy()))
        return flat.view(_torch_dtype(tensor)).reshape(tensor.entry.shape)

    def read_slice(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """Read entries `start` to `stop` along one axis, touching no other bytes of the tensor."""
        tensor = self._find(name)
        shape, dtype = tensor.entry.shape, _torch_dtype(tensor)
        if not (0 <= axis < len(shape) and 0 <= start <= stop <= shape[axis]):
            raise SourceError(f"{name}: no slice {start}:{stop} of axis {axis} in shape {list(shape)}")
        if tensor.scale:  # a slice may cut through blocks
            return self._read(tensor).narrow(axis, start, stop - start).contiguous()
        stride = math.prod(shape[axis + 1 :]) * dtype.itemsize
        rows, row, part = math.prod(shape[:axis]), shape[axis] * stride, (stop - start) * stride
        flat = torch.empty(rows * part, dtype=torch.uint8)
        first = tensor.entry.start + start * stride
        self._fill(tensor, range(first, first + rows * row, row or 1), memoryview(flat.numpy()))
        return flat.view(dtype).reshape(*shape[:axis], stop - start, *shape[axis + 1 :])

    def raw(self, name: str) -> bytes:
        """One tensor's exact bytes, whatever its dtype."""
        tensor = self._find(name)
        if tensor.scale:
            return bytes(tensor_bytes(self._read(tensor)))
        with self._opened(tensor, tensor.entry.nbytes) as fd:
            return read_range(fd, tensor.file, tensor.entry.start, tensor.entry.nbytes)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """One tensor's exact bytes in pieces of a few MiB, for tensors that are only copied."""
        tensor = self._find(name)
        if tensor.scale:
            whole = tensor_bytes(self._read(tensor))
            yield from (whole[first : first + CHUNK_BYTES] for first in range(0, len(whole), CHUNK_BYTES))
            return
        with self._opened(tensor, tensor.entry.nbytes) as fd:
            yield from read_pieces(fd, tensor.file, tensor.entry.start, tensor.entry.nbytes)

    def fingerprint(self) -> dict[str, str]:
        """Identify the checkpoint's content: file name to a line of size, header hash and content hash.

        Files up to 64 MiB are hashed whole; larger ones by a strided sample and their modification time.
        """
        prints = {"config.json": sha256_file(self.root / "config.json")}
        for shard in self.shards:
            content = _content_print(shard)
            prints[shard.path.name] = f"{shard.size} bytes, header {shard.digest[:16]}, {content}"
        return prints

    def side_files(self) -> list[Path]:
        """Every regular file to carry along (tokenizer, chat template, licence...), hidden files excluded.

        Raises SourceError for a link that leads out of the checkpoint, since its target would be published, and for a
        linked folder, whose files would be left out.
        """
        found = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            linked = [Path(folder, name) for name in folders if Path(folder, name).is_symlink()]
            if linked:
                raise SourceError(f"{linked[0]}: is a link to a folder; replace it by the folder itself, or remove it")
            paths = [Path(folder, name) for name in sorted(files) if not name.startswith(".")]
            found += [path for path in paths if _is_carried(self.root, path)]
        return found

    def prefetch(self, names: Iterable[str]) -> None:
        """Have tensors in the system's page cache when they are read; a read drops them from there.

        They are read for this: Linux follows advice to do so for the first few hundred KiB only.
        """
        room = memoryview(bytearray(CHUNK_BYTES))
        for name in names:
            tensor = self._find(name)
            entry = tensor.stored or tensor.entry
            fd = open_regular(tensor.file)
            try:
                for first in range(entry.start, entry.end, CHUNK_BYTES):
                    read_exact(fd, tensor.file, first, room[: min(CHUNK_BYTES, entry.end - first)])
            finally:
                os.close(fd)

    def _find(self, name: str) -> SourceTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise SourceError(f"{self.root}: has no tensor {name}; is it the right checkpoint?") from None

    def _fill(self, tensor: SourceTensor, starts: list[int] | range, buffer: memoryview) -> None:
        """Read equal pieces at absolute offsets `starts` into `buffer`, one after the other."""
        piece = len(buffer) // max(1, len(starts))
        with self._opened(tensor, len(buffer)) as fd:
            for number, start in enumerate(starts):
                read_exact(fd, tensor.file, start, buffer[number * piece : (number + 1) * piece])

    @contextmanager
    def _opened(self, tensor: SourceTensor, count: int) -> Iterator[int]:
        """The tensor's file, open while `count` of its bytes are read."""
        fd = open_regular(tensor.file)
        try:
            yield fd
            if count >= DROP_CACHE_BYTES:  # a checkpoint is read once: leave the page cache to others
                os.posix_fadvise(fd, tensor.entry.start, tensor.entry.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        self.bytes_read += count


def _read_object(path: Path) -> dict[str, Any]:
    value = read_json(path, SourceError, AGAIN)
    if not isinstance(value, dict):
        raise SourceError(f"{path}: holds a JSON {type(value).__name__}, not an object; {AGAIN}")
    return value


def _only_shard(root: Path) -> ShardHeader:
    names = sorted(path.name for path in root.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards == [SINGLE_NAME]:
        return read_header(root / SINGLE_NAME)
    if shards:
        raise SourceError(f"{root}: has {len(shards)} shards but no {INDEX_NAME}; download the index too")
    if any(Path(name).suffix in PICKLES for name in names):
        raise SourceError(f"{root}: has only pickled weights (.bin, .pt); convert them to safetensors first")
    raise SourceError(f"{root}: has neither {INDEX_NAME} nor {SINGLE_NAME}; check the path")


def _refuse_fp8(source: ShardedSource) -> None:
    """Tensors decide, not the config: a BF16 checkpoint may carry a left-over quantization block."""
    scales = [name for name in source.tensors if name.endswith(("_scale_inv", ".weight_scale"))]
    weights = [name for name, tensor in source.tensors.items()
               if name.endswith(".weight") and tensor.entry.dtype.startswith("F8_")]
    if scales or weights:
        raise SourceError(f"{source.root}: FP8 source ({len(weights)} FP8 weights, {len(scales)} scales: "
                          f"{some(weights + scales)}): use the BF16 one, or say --fp8 to make a checkpoint that "
                          "inherits what FP8 lost")


def _torch_dtype(tensor: SourceTensor) -> torch.dtype:
    if tensor.entry.dtype not in TORCH_DTYPE:
        raise SourceError(f"{tensor.file}: {tensor.entry.name} has dtype {tensor.entry.dtype}, which torch "
                          "cannot hold; only its raw bytes can be carried")
    return TORCH_DTYPE[tensor.entry.dtype]


def _content_print(shard: ShardHeader) -> str:
    if shard.size <= WHOLE_HASH_BYTES:
        return f"sha256 {sha256_file(shard.path)}"
    digest = hashlib.sha256()
    fd = open_regular(shard.path)
    try:
        for number in range(SAMPLES):
            start = (shard.size - SAMPLE_BYTES) * number // (SAMPLES - 1)
            piece = bytearray(SAMPLE_BYTES)
            read_exact(fd, shard.path, start, memoryview(piece))
            digest.update(piece)
        mtime = os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
    return f"sample {digest.hexdigest()}, mtime {mtime}"


def _is_carried(root: Path, path: Path) -> bool:
    if path.suffix in WEIGHTS or path.name in NOT_CARRIED or path.name.endswith(".index.json"):
        return False
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise SourceError(f"{path}: is a link to nothing ({error.strerror}); remove it or fetch its target") from None
    if not stat.S_ISREG(mode):
        raise SourceError(f"{path}: is not a regular file; remove it from the checkpoint's folder")
    target = path.resolve()
    # A hub cache keeps files in ../../blobs and links to them from the snapshot.
    homes = (root.resolve(), root.resolve().parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        raise SourceError(f"{path}: links to {target}, outside the checkpoint; replace the link by a copy")
    return True
