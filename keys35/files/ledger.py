"""The ledger of a work directory: which units are done, with what bytes, for which job.

A unit is done when its receipt exists, and receipts are written last, so a kill at any moment costs one unit.
"""

import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keys35.errors import ResumeError
from keys35.files.atomic import FULL, PARTIAL, Saved, make_folder, read_json, sha256_file, write_json

LOG = logging.getLogger(__name__)
SCHEMA = 1
WHEREABOUTS = "whereabouts.json"  # where the source lies now, and what else may change between two runs of a job
MANIFEST, LOCK, LOG_FILE, RECEIPTS = "manifest.json", "lock", "log.jsonl", "receipts"
BEFORE_MANIFEST = {LOCK, LOG_FILE, MANIFEST + PARTIAL, "lost+found"}  # the last is all that a new disk holds
BEGUN = "begun"  # the log's event for a unit that was handed out; the line that ends it names its kind
FRESH = "choose an empty work directory, or restore the file from a backup"
BEGIN_AGAIN = "begin with `keys35 measure SOURCE --recipe R --work W` again, which writes it and keeps what is finished"


@contextmanager
def held(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold a folder, made if it is not there, for one driver; the lock ends with its process, however it dies.

    wait: for another holder to end. Raises ResumeError naming the process that holds it, or the disk that cannot lock
    or is full.
    """
    with _full_is_said(folder, "its lock can be made"):
        make_folder(folder, ResumeError)
        file = open(folder / LOCK, "a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as cause:
            if cause.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise ResumeError(f"{folder}: its disk cannot lock files ({cause.strerror}), so that a second driver "
                                  "would not be noticed; choose a folder on another disk, or let the network's file "
                                  "server serve locks") from cause
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ResumeError(f"{folder}: is in use by process {holder}; wait or stop it") from cause
        with _full_is_said(folder, "its lock can be written"):
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()} on {os.uname().nodename}\n".encode())
        yield


@contextmanager
def _full_is_said(folder: Path, what: str) -> Iterator[None]:
    """A full disk as a ResumeError that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ResumeError(f"{folder}: disk full, not even {what}; free space and run the same command again, "
                              "finished work is kept") from error
        raise


@dataclass(frozen=True, slots=True)
class Workdir:
    """A work directory bound to one job."""

    root: Path
    job: dict[str, Any]

    @classmethod
    def open(cls, root: Path, job: dict[str, Any] | None) -> "Workdir":
        """Create a work directory for `job`, or resume one that was created for the same job.

        `job` is whatever guards a resume (source, recipe, tool version; JSON values). None opens an existing
        directory as it is. Raises ResumeError listing every difference, or naming a damaged manifest.
        """
        root = Path(root).absolute()
        manifest = root / MANIFEST
        if not manifest.exists():
            return cls._create(root, job)
        stored = read_json(manifest, remedy=FRESH)
        if not isinstance(stored, dict) or not isinstance(stored.get("job"), dict):
            raise ResumeError(f"{manifest}: is not a manifest of keys35; {FRESH}")
        if stored.get("schema") != SCHEMA:
            raise ResumeError(f"{manifest}: has schema {stored.get('schema')!r}, not {SCHEMA}; {FRESH}")
        if job is not None:
            _refuse_another(root, stored["job"], _as_json(job))
        return cls(root, stored["job"])

    @classmethod
    def _create(cls, root: Path, job: dict[str, Any] | None) -> "Workdir":
        if job is None:
            raise ResumeError(f"{root}: has no {MANIFEST}; give the work directory of an earlier run")
        if root.exists() and (not root.is_dir() or {path.name for path in root.iterdir()} - BEFORE_MANIFEST):
            raise ResumeError(f"{root}: holds files but no {MANIFEST}, so it is not ours; {FRESH}")
        job = _as_json(job)
        make_folder(root, ResumeError)
        write_json(root / MANIFEST, {"schema": SCHEMA, "job": job})
        return cls(root, job)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for one driver; leftovers of an interrupted run are removed first.

        Raises ResumeError naming the process that holds it, the disk that cannot lock, or how the job differs from one
        that began here at the same time. The lock ends with its process, however it dies.
        """
        with held(self.root):
            Workdir.open(self.root, self.job)  # two that begin at once may both have found it empty
            for leftover in self.root.rglob("*" + PARTIAL):
                leftover.unlink(missing_ok=True)
            yield

    def path(self, *parts: str) -> Path:
        """A path inside the work directory; ResumeError for a part that would leave it."""
        for part in "/".join(parts).split("/"):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*", part):
                raise ResumeError(f"{self.root}: {'/'.join(parts)!r} is no legal name in a work directory")
        return self.root.joinpath(*parts)

    def commit(
        self, unit: str, files: Sequence[Path] | Mapping[Path, str | Saved], data: dict[str, Any]
    ) -> None:
        """Declare a unit done: record size and SHA-256 of its finished files, and JSON `data`.

        A mapping from file to SHA-256 saves hashing again what was hashed while it was written; `Saved` also
        records every tensor's.
        """
        hashes = files if isinstance(files, Mapping) else {path: sha256_file(path) for path in files}
        entries = [{"path": Path(path).absolute().relative_to(self.root).as_posix(), "size": os.stat(path).st_size,
                    **(asdict(digest) if isinstance(digest, Saved) else {"sha256": digest})}
                   for path, digest in hashes.items()]
        write_json(self._receipt_path(unit), {"unit": unit, "files": entries, "data": data})

    def receipt(self, unit: str) -> dict[str, Any] | None:
        """The unit's receipt, or None if it must be done (again): none, damaged, or a file missing or cut."""
        path = self._receipt_path(unit)
        if not path.exists():
            return None
        try:
            receipt = read_json(path)
            whole = receipt["unit"] == unit and isinstance(receipt["data"], dict) and all(
                self.path(entry["path"]).stat().st_size == entry["size"] and isinstance(entry["sha256"], str)
                for entry in receipt["files"])
        except (ResumeError, OSError, KeyError, TypeError) as cause:
            LOG.warning("unit %s will be redone: %s", unit, cause)
            return None
        return receipt if whole else None

    def require(self, unit: str) -> dict[str, Any]:
        """The receipt of a unit that must be finished; raises ResumeError naming it if it is not."""
        receipt = self.receipt(unit)
        if receipt is None:
            raise ResumeError(f"{self.root}: '{unit}' is missing or damaged; run the same command again")
        return receipt

    def recorded(self, unit: str) -> dict[Path, str | Saved]:
        """A finished unit's files as `commit` takes them, for committing it again with others; ResumeError if not."""
        return {self.path(entry["path"]): Saved(entry["sha256"], entry["header"], entry["tensors"])
                if "tensors" in entry else entry["sha256"] for entry in self.require(unit)["files"]}

    def units(self) -> list[str]:
        """Names of all units with a receipt, in order."""
        folder = self.root / RECEIPTS
        return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.json"))

    def log(self, event: str, **fields: Any) -> None:
        """Append one JSON line with the UTC time to the directory's log."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        with _full_is_said(self.root, "the log can grow"), open(self.root / LOG_FILE, "ab+") as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")  # a kill cut the last line short: do not write onto it
            file.write((json.dumps(line) + "\n").encode())

    def events(self) -> list[dict[str, Any]]:
        """All lines of the log, except those that a kill or a full disk cut short or that are none of ours."""
        path = self.root / LOG_FILE
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [event for line in lines if (event := _whole(line)) is not None]

    def _receipt_path(self, unit: str) -> Path:
        path = self.path(RECEIPTS, unit)
        return path.with_name(path.name + ".json")


def _whole(line: bytes) -> dict[str, Any] | None:
    """A line's event; None if it was cut, which may be behind the bracket of something inside it, or says not when."""
    try:
        event = json.loads(line)
        datetime.fromisoformat(event["time"])
        return event if isinstance(event["event"], str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _as_json(job: dict[str, Any]) -> dict[str, Any]:
    """The job as it comes back from disk, so that tuples and lists compare equal."""
    return json.loads(json.dumps(job))


def _refuse_another(root: Path, stored: dict[str, Any], job: dict[str, Any]) -> None:
    differences = _differences(stored, job)
    if differences:
        raise ResumeError(f"{root}: belongs to another job; undo these changes or choose an empty work directory:\n  "
                          + "\n  ".join(differences))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    before, after = _flat(old), _flat(new)
    return [f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
            for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dicts as dotted keys, leaves as JSON text (so that NaN equals NaN)."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(item)
    return flat
