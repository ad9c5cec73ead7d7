"""The index of a checkpoint against its files: every disagreement is refused before a weight is read."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keys35.errors import IncompleteError, SourceError
from keys35.files.headers import ShardHeader, read_header

ARRIVING = {".incomplete", ".part", ".aria2", ".tmp"}
AGAIN = "download the checkpoint again"


def read_weight_map(path: Path, index: Any) -> dict[str, str]:
    """The index's map from tensor to file; every file name is checked before it becomes a path."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: has no weight_map; {AGAIN}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]*\.safetensors", file):
            raise SourceError(f"{path}: {name} lies in {file!r}, not a plain .safetensors file name; "
                              "do not use this checkpoint")
    return weight_map


def check_files(root: Path, files: list[str]) -> None:
    """The index's files against the folder's, and the `-of-NNNNN` totals against the count of files that have one."""
    present = {path.name for path in root.iterdir() if path.name.endswith(".safetensors")}
    missing = [file for file in files if file not in present]
    if missing:
        arriving = sorted(path.name for path in root.rglob("*") if path.suffix in ARRIVING)
        more = f" ({len(arriving)} are arriving: {some(arriving)})" if arriving else ""
        raise IncompleteError(f"{root}: {len(missing)} files of the index are not there: {some(missing, 20)}{more}; "
                              "finish the download, or wait for it with --wait")
    extra = sorted(present - set(files))
    if extra:
        raise SourceError(f"{root}: {len(extra)} files are not in the index: {some(extra)}; it is stale "
                          "or they are left over: download it again or move them away")
    numbered = [match for file in files if (match := re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", file))]
    sets = Counter(match[1] for match in numbered)  # beside a model's own there may be its MTP layer's, or one file
    for match in numbered:
        if not 1 <= int(match[2]) <= int(match[3]) == sets[match[1]]:
            raise SourceError(f"{root}: {match[0]} does not belong to a set of {sets[match[1]]} shards; the index is "
                              f"stale, {AGAIN}")


def read_headers(root: Path, files: list[str]) -> tuple[ShardHeader, ...]:
    """All headers; shards that end early are refused together, since more than one is being downloaded."""
    headers, cut = [], []
    for file in files:
        try:
            headers.append(read_header(root / file))
        except IncompleteError as error:
            cut.append(str(error))
    if len(cut) == 1:
        raise IncompleteError(cut[0])
    if cut:
        raise IncompleteError(f"{root}: {len(cut)} shards are not whole, finish the download, or wait for it with "
                              "--wait:\n  " + "\n  ".join(cut[:20]))
    return tuple(headers)


def check_agreement(root: Path, shards: Sequence[ShardHeader], weight_map: dict[str, str], metadata: Any) -> None:
    """Every tensor of the index in its shard, every tensor of a shard in the index, and the sizes equal."""
    held = {shard.path.name: shard.entries for shard in shards}
    absent = [f"{name} in {file}" for name, file in weight_map.items() if name not in held[file]]
    if absent:
        raise SourceError(f"{root}: shards lack tensors of the index: {some(absent)}; {AGAIN}")
    surplus = [f"{name} in {shard.path.name}" for shard in shards for name in shard.entries
               if weight_map.get(name) != shard.path.name]
    if surplus:
        raise SourceError(f"{root}: shards hold tensors not in the index: {some(surplus)}; {AGAIN}")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(entry.nbytes for shard in shards for entry in shard.entries.values())
    if claimed is not None and claimed != total:
        raise SourceError(f"{root}: the index says {claimed} bytes of tensors, the shards hold "
                          f"{total}; the index is stale, {AGAIN}")


def some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
