"""Which files of a checkpoint are published, and their SHA-256, computed once and remembered beside it."""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from keys35.errors import Keys35Error, PublishError
from keys35.files.atomic import PARTIAL, read_json, sha256_file, write_json

LOG = logging.getLogger(__name__)
MARKER = "KEYS35_UPLOAD_COMPLETE.json"
LEFTOVERS = {".bak", ".incomplete", ".lock", ".log", ".orig", ".pyc", ".tmp", PARTIAL}
READ_WHOLE = 64 << 20


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to be published: its name in the repository, where it lies, its size in bytes and its SHA-256."""

    name: str
    path: Path
    size: int
    sha256: str

    def blob_id(self) -> str:
        """The id git gives to these bytes; the hub reports it for the small files that it does not keep as LFS."""
        with open(self.path, "rb") as file:
            return git_blob_id(self.size, iter(lambda: file.read(1 << 20), b""))


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the hub says about a file: `sha256` for LFS files, git's `blob_id` decides for the others."""

    name: str
    size: int
    sha256: str | None
    blob_id: str

    def differs_from(self, local: LocalFile) -> str:
        """How the hub's copy differs from the local one, "" if it does not."""
        if self.size != local.size:
            return f"{local.name}: {self.size} bytes on the hub, {local.size} here"
        if self.sha256 is None:
            here, there = (local.blob_id(), self.blob_id) if local.size <= READ_WHOLE else ("not small", self.blob_id)
        else:
            here, there = local.sha256, self.sha256
        return "" if here == there else f"{local.name}: the hub holds {there}, here is {here}"


def git_blob_id(size: int, pieces: Iterable[bytes]) -> str:
    """Git's id of a file of `size` bytes that arrives in pieces."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def published_names(root: Path) -> list[str]:
    """Names of the files that make up the checkpoint, in order; hidden files and folders are not among them.

    Raises PublishError for leftovers and links that lead out of `root`: nobody meant to publish them.
    """
    names = sorted(_walk(root))
    problems = [problem for name in names if (problem := _unfit(root, name))]
    if problems:
        raise PublishError(f"{root}: not part of a checkpoint: {'; '.join(problems[:5])}; move them away")
    return [name for name in names if name != MARKER]


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name).relative_to(root).as_posix() for name in files if not name.startswith("."))


def _unfit(root: Path, name: str) -> str:
    path = root / name
    if PurePosixPath(name).suffix in LEFTOVERS or name.endswith("~") or "__pycache__" in name.split("/"):
        return f"{name} is a leftover"
    if not path.is_file():
        return f"{name} is not a regular file"
    if not path.resolve().is_relative_to(root.resolve()):
        return f"{name} links to {path.resolve()}"
    if not name.isascii() and name.encode(errors="replace").decode() != name:
        return f"{ascii(name)} has a name that is not UTF-8"
    return ""


class Hashes:
    """SHA-256 of files under `root`, remembered in a file beside it while size and modification time stay.

    A resumed upload of 270 GB does not read 270 GB again. Kept out of `root`, since all of `root` is published.
    """

    def __init__(self, root: Path):
        self.root = Path(root).resolve()
        self._writing = Lock()
        self.path = self.root.parent / f"{self.root.name}.hashes.json"
        try:
            self._known: dict[str, Any] = dict(read_json(self.path)) if self.path.exists() else {}
        except (Keys35Error, ValueError, TypeError):
            self._known = {}  # only a cache: what cannot be read is computed again

    def file(self, name: str) -> LocalFile:
        """Identify one file; PublishError if it changes while it is read."""
        path = self.root / name
        before = _stamp(path)
        known = self._known.get(name)
        if not isinstance(known, list) or known[:2] != before:
            known = [*before, sha256_file(path)]
            if _stamp(path) != before:
                raise PublishError(f"{path}: changes while it is read; wait until it is finished")
            self._remember(name, known)
        return LocalFile(name, path, before[0], known[2])

    def _remember(self, name: str, known: list[Any]) -> None:
        with self._writing:
            self._known[name] = known
            try:
                write_json(self.path, self._known)
            except (OSError, Keys35Error) as error:
                LOG.info("hashes are not kept: %s", error)  # beside it may be read-only; nothing depends on it


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
