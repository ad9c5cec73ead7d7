"""Upload a finished checkpoint: its files, then a comparison with what the hub says it holds, then the marker.

The hub's own list of files is the ledger: what it holds with the right hash is done, so an interrupted upload
goes on where it was, from any machine that has the checkpoint.
"""

import json
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from keys35.errors import PublishError
from keys35.progress import Progress
from keys35.publish.files import MARKER, LocalFile, RemoteFile, git_blob_id
from keys35.publish.hub import Hub
from keys35.publish.preflight import preflight

WORKERS = 2  # more make the hub's storage answer 503; with xet each file is already sent in parallel
PER_COMMIT = 16  # the hub allows some 100 commits an hour, and a commit of everything would lose it all


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What stands on the hub now. `sent` are the files this run had to send, the marker included."""

    repo: str
    revision: str
    files: int
    bytes: int
    sent: tuple[str, ...]


def upload(
    out: Path, hub: Hub, progress: Progress | None = None, private: bool = False, prune: bool = False
) -> Uploaded:
    """Publish the checkpoint in `out`; a second run sends nothing, an interrupted one goes on.

    `prune` deletes files of the repository that are not the checkpoint's; without it they are refused. Raises
    ContractError or PublishError, both before anything is sent if `out` is at fault.
    """
    progress = progress or Progress()
    files = preflight(out, hub.repo, progress)
    hub.create(private)
    head = hub.resolve()
    remote = hub.files(head)
    strays = sorted(remote.keys() - {file.name for file in files} - {MARKER})
    if strays and not prune:
        raise PublishError(f"{hub.repo}: holds {len(strays)} files that are not the checkpoint's: "
                           f"{', '.join(strays[:5])}; choose another repository or delete them with --prune")
    marker = marker_bytes(files)
    missing = [file for file in files if _needed(file, remote)]
    sent: tuple[str, ...] = ()
    if missing or strays or not _is_marker(marker, remote.get(MARKER)):
        _withdraw(hub, [*strays, MARKER])
        _send(hub, files, missing, progress)
        head = _finish(hub, files, marker)
        sent = (*(file.name for file in missing), MARKER)
    return Uploaded(hub.repo, head, len(files), sum(file.size for file in files), sent)


def marker_bytes(files: Sequence[LocalFile]) -> bytes:
    """The completion marker: every file with its size and SHA-256; the same checkpoint gives the same bytes."""
    listed = [{"file": file.name, "bytes": file.size, "sha256": file.sha256} for file in files]
    value = {"format": "keys35-upload-v1", "total_bytes": sum(file.size for file in files), "files": listed}
    return (json.dumps(value, indent=1) + "\n").encode()


def _needed(file: LocalFile, remote: dict[str, RemoteFile]) -> bool:
    return file.name not in remote or bool(remote[file.name].differs_from(file))


def _is_marker(marker: bytes, remote: RemoteFile | None) -> bool:
    return remote is not None and remote.blob_id == git_blob_id(len(marker), [marker])


def _withdraw(hub: Hub, names: list[str]) -> None:
    """Delete an earlier marker, and strays, before anything changes: a marker must never stand on half a checkpoint."""
    hub.commit("Withdraw the completion marker", lambda remote: [
        CommitOperationDelete(name, is_folder=False) for name in names if name in remote])


def _send(hub: Hub, files: Sequence[LocalFile], missing: list[LocalFile], progress: Progress) -> None:
    """Send the bytes two files at a time, and name them in commits of a few files each."""
    with ThreadPoolExecutor(WORKERS) as pool:
        operations = pool.map(hub.preload, missing)  # in order; a failure cancels what has not started
        ready: dict[LocalFile, CommitOperationAdd] = {}
        for step in progress.walk("upload", [*missing, *(f for f in files if f not in missing)], attrgetter("name")):
            step.kept = step.unit not in missing
            if not step.kept:
                ready[step.unit] = next(operations)
            if ready and (len(ready) == PER_COMMIT or step.unit is missing[-1]):
                _commit(hub, ready)
                ready = {}


def _commit(hub: Hub, ready: dict[LocalFile, CommitOperationAdd]) -> None:
    hub.commit(f"Add {len(ready)} files", lambda remote: [
        operation for file, operation in ready.items() if _needed(file, remote)])


def _finish(hub: Hub, files: Sequence[LocalFile], marker: bytes) -> str:
    """Compare every file with what the hub holds, write the marker on exactly that commit, and look once more."""
    compared = hub.resolve()
    _compare(hub, files, compared)
    hub.commit("Mark the checkpoint as complete", lambda remote: (
        [] if _is_marker(marker, remote.get(MARKER)) else [CommitOperationAdd(MARKER, marker)]), parent=compared)
    finished = hub.resolve()
    _compare(hub, files, finished, {MARKER})
    return finished


def _compare(hub: Hub, files: Sequence[LocalFile], revision: str, besides: Collection[str] = ()) -> None:
    remote = hub.files(revision)
    problems = [f"{file.name}: is not on the hub" for file in files if file.name not in remote]
    problems += [difference for file in files if file.name in remote
                 and (difference := remote[file.name].differs_from(file))]
    names = {*besides, *(file.name for file in files)}
    problems += [f"{name}: is not the checkpoint's" for name in sorted(remote.keys() - names)]
    problems += [f"{name}: is not on the hub" for name in besides if name not in remote]
    if problems:
        raise PublishError(f"{hub.repo} at {revision}: is not the checkpoint: {'; '.join(problems[:5])}; "
                           "run the same command again")
