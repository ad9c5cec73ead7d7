"""Scan: read every weight once and name what is broken before hours are spent on it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from keys35.errors import SourceError
from keys35.files.source import ShardedSource
from keys35.progress import Progress


@dataclass(frozen=True)
class Broken:
    """A tensor with values that are not finite: how many, and where the first one is."""

    name: str
    count: int
    index: tuple[int, ...]
    value: float

    def __str__(self) -> str:
        return f"{self.name}: {self.count} values are not finite, the first is {self.value} at {list(self.index)}"


def scan(source: Path, progress: Progress, fp8: bool = False) -> int:
    """Check every floating-point tensor of a source, one in memory at a time; returns how many were read.

    Raises SourceError listing each tensor with NaN or Inf, the index of the first and their number.
    """
    opened = ShardedSource.open(source, fp8)
    found, read = [], 0
    for step in progress.walk("scan", opened.shards, lambda shard: shard.path.name):
        names = [name for name in step.unit.entries if name in opened.tensors]  # FP8 scales are part of their weights
        found += broken_tensors(opened, names)
        read += len(names)
    if found:
        shown = "\n  ".join(str(item) for item in found[:20])
        more = f"\n  and {len(found) - 20} more" if len(found) > 20 else ""
        raise SourceError(f"{source} is damaged, fetch these tensors' shards again:\n  {shown}{more}")
    return read


def broken_tensors(source: ShardedSource, names: Iterable[str]) -> Iterator[Broken]:
    """Those of the named tensors that hold NaN or Inf, read one at a time."""
    for name in names:
        tensor = source.read(name)
        if not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if bad.any():
            first = tuple(torch.nonzero(bad)[0].tolist())
            yield Broken(name, int(bad.sum()), first, float(tensor[first]))
