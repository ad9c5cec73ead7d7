"""Rules about the folder, its shards and their index."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keys35.errors import SourceError
from keys35.files.atomic import PARTIAL, read_json
from keys35.files.headers import ShardHeader, read_header
from keys35.files.shards import INDEX_NAME, shard_name
from keys35.files.source import PICKLES
from keys35.stages.contract import Finding, broken

MAX_ENTRIES = 10_000


def check_folder(root: Path) -> Iterator[Finding]:
    """Rules that need file names only."""
    folders = {folder: files for folder, _, files in os.walk(root)}
    files = [Path(folder, name).relative_to(root).as_posix()
             for folder, names in folders.items() for name in names]
    entries = {folder: len(os.listdir(folder)) for folder in folders}
    crowded = [(folder, f"has {count}") for folder, count in entries.items() if count > MAX_ENTRIES]
    yield from broken("folder-entries", crowded)
    yield from broken("partial-left", ((name, "is left over") for name in files if name.endswith(PARTIAL)))
    yield from broken("pickled-weights", ((name, "is one") for name in files if Path(name).suffix in PICKLES))
    nested = [name for name in files if "/" in name and name.endswith(".safetensors")]
    yield from broken("shard-names", ((name, "lies in a subfolder") for name in nested))


def read_shards(root: Path) -> tuple[list[ShardHeader], list[Finding]]:
    """Every readable shard of the folder, whatever the index says, and findings for the others."""
    shards, unreadable = [], []
    for path in sorted(root.glob("*.safetensors")):
        try:
            shards.append(read_header(path))
        except SourceError as error:
            unreadable.append((path.name, str(error)))
    return shards, list(broken("shard-header", unreadable))


def read_index(root: Path) -> tuple[dict[str, str], int | None, list[Finding]]:
    """The index's weight_map and total_size; empty with a finding if it cannot be used."""
    try:
        index = read_json(root / INDEX_NAME, SourceError, "assemble again")
        weight_map, total = index["weight_map"], index["metadata"]["total_size"]
        unsafe = [name for name, file in weight_map.items() if not _is_plain(file)]
    except (SourceError, KeyError, TypeError, AttributeError) as error:
        return {}, None, list(broken("index-file", [(INDEX_NAME, f"cannot be used ({error!r})")]))
    findings = broken("index-file", ((name, f"lies in {weight_map[name]!r}") for name in unsafe))
    return {name: file for name, file in weight_map.items() if name not in unsafe}, total, list(findings)


def _is_plain(file: Any) -> bool:
    return isinstance(file, str) and bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors", file))


def check_shards(
    shards: list[ShardHeader], weight_map: dict[str, str], total_size: int | None
) -> Iterator[Finding]:
    """Rules that hold shards and index against each other."""
    present = {shard.path.name: shard for shard in shards}
    listed = set(weight_map.values())
    yield from broken("shard-stray", ((n, "is not in the index") for n in sorted(present.keys() - listed)))
    yield from broken("index-shard", ((n, "cannot be read") for n in sorted(listed - present.keys())))
    wanted = {shard_name(number + 1, len(listed)) for number in range(len(listed))}
    odd = sorted(listed - wanted)
    yield from broken("shard-names", ((name, f"is not one of {len(listed)}") for name in odd))
    crooked = [shard.path.name for shard in shards if shard.data_start % 8]
    yield from broken("shard-aligned", ((name, "does not") for name in crooked))
    counts = Counter(name for shard in shards for name in shard.entries)
    yield from broken("tensor-twice", ((name, f"lies in {n}") for name, n in counts.items() if n > 1))
    lost = [(name, f"is not in {file}") for name, file in weight_map.items()
            if file in present and name not in present[file].entries]
    unlisted = [(name, "is not in the index") for name in counts if name not in weight_map]
    yield from broken("index-tensor", lost + unlisted)
    stored = sum(entry.nbytes for shard in shards for entry in shard.entries.values())
    if weight_map and (type(total_size) is not int or total_size != stored):  # without one the index was refused
        yield from broken("index-size", [(INDEX_NAME, f"says {total_size!r}, {stored} are stored")])
