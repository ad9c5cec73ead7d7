"""Fetch a source checkpoint at one pinned commit, file by file, and prove that it is what the hub holds."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath

from keys35.errors import PublishError
from keys35.files.atomic import require_space
from keys35.files.ledger import held
from keys35.files.source import WEIGHTS, ShardedSource
from keys35.progress import Progress
from keys35.publish.files import Hashes, RemoteFile
from keys35.publish.hub import Hub

LOG = logging.getLogger(__name__)
WORKERS = 4
TRIES = 2
SHARD = ".safetensors"
UNUSED = WEIGHTS - {SHARD}


@dataclass(frozen=True, slots=True)
class Fetched:
    """A source on disk, and the commit it is; `source` is open."""

    repo: str
    revision: str
    files: int
    bytes: int
    source: ShardedSource


def fetch(hub: Hub, to: Path, progress: Progress | None = None, revision: str | None = None) -> Fetched:
    """Fetch a checkpoint's safetensors and everything small into `to`; what is there and right is kept.

    `revision` is a branch, tag or commit, the default branch if None; it is resolved once, so that files of two
    commits are never mixed. Sizes and SHA-256 are compared with the hub's. An interrupted fetch goes on with the
    file it was in. Raises PublishError for the hub's refusals and files that stay wrong, PlanError for too
    little space, ResumeError while another fetch fills the folder, SourceError if what arrived is no usable checkpoint.
    """
    to = Path(to)
    commit = hub.resolve(revision)
    LOG.info("%s: fetching commit %s", hub.repo, commit)
    # The index and the configs first: they are small, and say early if this is the wrong model.
    files = sorted((f for f in hub.files(commit).values() if _is_wanted(f.name)),
                   key=lambda f: (f.name.endswith(SHARD), f.name))
    _refuse_foreign(to, {f.name for f in files})
    with held(to / ".cache" / "keys35"):  # hidden: what else lies in the folder is carried along
        _clear_interrupted(to)
        here = sum((to / f.name).stat().st_size for f in files if (to / f.name).is_file())
        require_space(to, max(0, sum(f.size for f in files) - here))
        hashes = Hashes(to)
        with ThreadPoolExecutor(WORKERS) as pool:
            arrived = pool.map(lambda file: _bring(hub, hashes, file, commit), files)
            for step in (progress or Progress()).walk("fetch", files, attrgetter("name")):
                step.kept = next(arrived)
    return Fetched(hub.repo, commit, len(files), sum(f.size for f in files), ShardedSource.open(to, fp8=None))


def _is_wanted(name: str) -> bool:
    """Not the pickled or converted copies of the weights; a name that would leave the folder is refused."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\\" in name or "\0" in name:
        raise PublishError(f"the hub lists a file {name!r}, which would lie outside the folder; do not use this source")
    return PurePosixPath(name).suffix not in UNUSED and not name.startswith(".")


def _refuse_foreign(to: Path, names: set[str]) -> None:
    """Another checkpoint's shards would make the folder unusable, but only after hours."""
    foreign = sorted(path.name for path in to.glob("*" + SHARD) if path.name not in names)
    if foreign:
        raise PublishError(f"{to}: holds another checkpoint's shards: {', '.join(foreign[:5])}; choose an empty folder")


def _clear_interrupted(to: Path) -> None:
    """Remove what a killed download left: huggingface_hub never reads it again, and it may be whole shards."""
    for leftover in (to / ".cache" / "huggingface" / "download").rglob("*.incomplete"):
        leftover.unlink(missing_ok=True)


def _bring(hub: Hub, hashes: Hashes, file: RemoteFile, commit: str) -> bool:
    """Have one file in place and proved; True if it was there before. A wrong one is fetched once more."""
    path = hashes.root / file.name
    if path.is_file() and not file.differs_from(hashes.file(file.name)):
        return True
    for _ in range(TRIES):
        path.unlink(missing_ok=True)  # huggingface_hub takes a file it once fetched as right, whatever it holds now
        hub.download(file.name, commit, hashes.root)
        difference = file.differs_from(hashes.file(file.name))
        if not difference:
            return False
        LOG.warning("%s: %s; fetching it again", hub.repo, difference)
    raise PublishError(f"{hub.repo}: fetched {TRIES} times and still wrong: {difference}; check disk and network")
