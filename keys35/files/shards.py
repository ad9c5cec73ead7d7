"""Shards of the output, streamed one tensor at a time, and the index over them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from keys35.errors import PlanError
from keys35.files.ahead import ahead
from keys35.files.atomic import Contents, write_json, write_safetensors
from keys35.files.headers import tensor_nbytes

INDEX_NAME = "model.safetensors.index.json"
METADATA = {"format": "pt"}  # which transformers asks for


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to be written: safetensors dtype, shape, and a call that makes its bytes, whole or in pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Contents]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ShardReceipt:
    """What a finished shard holds; tensor names in data order, sizes in bytes."""

    file: str
    size: int
    sha256: str
    tensors: tuple[str, ...]
    tensor_bytes: int


def shard_name(number: int, total: int) -> str:
    """File name of shard `number` (from 1) of `total`."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def write_shard(path: Path, specs: Sequence[TensorSpec]) -> ShardReceipt:
    """Stream one shard to disk atomically, hashing on the way; the next pieces are read while these are written.

    Tensors keep the order given. At most two tensors are in memory, of large
    ones that come in pieces only a few of those. PlanError if a producer's bytes do not match its dtype and shape;
    ResumeError with the needed and free bytes if the disk fills up. In both cases nothing is left under the final name.
    """
    layout = [(spec.name, spec.dtype, spec.shape) for spec in specs]
    with closing(ahead(_flat(specs))) as pieces:
        contents = (takewhile(lambda piece: piece is not None, pieces) for _ in specs)
        size, digest = write_safetensors(path, layout, contents, METADATA)
    total = sum(spec.nbytes for spec in specs)
    return ShardReceipt(Path(path).name, size, digest, tuple(spec.name for spec in specs), total)


def _flat(specs: Sequence[TensorSpec]) -> Iterator[bytes | memoryview | None]:
    """All tensors' pieces in order; None ends a tensor."""
    for spec in specs:
        data = spec.read()
        yield from data if isinstance(data, Iterator) else [data]
        del data  # not kept while the next one is read
        yield None


def write_index(path: Path, receipts: Sequence[ShardReceipt], total_size: int) -> None:
    """Write the Hugging Face index of the shards, recomputed from what was written.

    PlanError if a tensor lies in two shards or `total_size` (bytes) is not the sum of the shards' tensors.
    """
    weight_map: dict[str, str] = {}
    for receipt in receipts:
        for name in receipt.tensors:
            if name in weight_map:
                raise PlanError(f"{path}: {name} lies in both {weight_map[name]} and {receipt.file}; "
                                "give every tensor one shard")
            weight_map[name] = receipt.file
    written = sum(receipt.tensor_bytes for receipt in receipts)
    if written != total_size:
        raise PlanError(f"{path}: the shards hold {written} bytes of tensors, the plan says {total_size}; "
                        "assemble again from an empty folder")
    write_json(path, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
