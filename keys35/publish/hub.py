"""One repository on the hub, reached patiently: every call is repeated while its failure may pass.

Only calls that huggingface_hub has had since 0.25 are used. Its `upload_large_folder` is not: it is gone from
version 2, keeps a cache folder inside the folder it publishes, takes patterns instead of a list of files, and
commits when it likes, so that nothing could be compared before the last file goes up.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars

from keys35.errors import PublishError
from keys35.files.atomic import FULL
from keys35.publish.files import LocalFile, RemoteFile

LOG = logging.getLogger(__name__)
T = TypeVar("T")
WAITS = (1, 2, 4, 8, 15, 30, 60, 60)
# The HTTP library changed with the major versions of huggingface_hub; its errors are the bases of this one.
PASSING = (OSError, RuntimeError, *HfHubHTTPError.__bases__)
MAY_PASS = {408, 423, 425, 429}
MOVED = {409, 412}
ADVICE = {
    401: "log in with `hf auth login` or set HF_TOKEN",
    403: "the token may not do this: it needs write access, or the gate's terms accepted",
    404: "check the name, and that the token may see it",
    412: "somebody else changed the repository meanwhile; run the same command again",
    413: "a file is larger than the hub takes",
}
Operation = CommitOperationAdd | CommitOperationDelete


@dataclass(slots=True)
class Hub:
    """A model repository; `waits` are the pauses in seconds after each failure of one call.

    Every method raises PublishError with advice when the hub refuses or stays away.
    """

    repo: str
    api: HfApi
    waits: Sequence[float] = WAITS

    @classmethod
    def connect(cls, repo: str) -> "Hub":
        """The repository at the endpoint and with the token that HF_ENDPOINT, HF_TOKEN or a login give."""
        disable_progress_bars()  # the stage has its own
        return cls(repo, HfApi(library_name="keys35"))

    def create(self, private: bool) -> None:
        """Create the repository unless it exists."""
        self._patient("create it", lambda: self.api.create_repo(self.repo, private=private, exist_ok=True))

    def resolve(self, revision: str | None = None) -> str:
        """The commit that a branch, a tag or the default branch points to now."""
        info = self._patient("find it", lambda: self.api.model_info(self.repo, revision=revision))
        return info.sha

    def files(self, revision: str) -> dict[str, RemoteFile]:
        """Every file of a commit by name, with sizes and hashes; `.gitattributes` is the hub's own and left out."""
        entries = self._patient("list its files", lambda: list(
            self.api.list_repo_tree(self.repo, recursive=True, revision=revision)))
        return {e.path: RemoteFile(e.path, e.size, e.lfs.sha256 if e.lfs else None, e.blob_id)
                for e in entries if isinstance(e, RepoFile) and e.path != ".gitattributes"}

    def preload(self, file: LocalFile) -> CommitOperationAdd:
        """Send a file's bytes, if it is kept as LFS and the hub has not got them; a later commit names it."""
        operation = CommitOperationAdd(file.name, str(file.path))
        self._patient(f"upload {file.name}", lambda: self.api.preupload_lfs_files(
            self.repo, [operation], num_threads=1, free_memory=False))
        return operation

    def commit(
        self,
        message: str,
        operations: Callable[[dict[str, RemoteFile]], Sequence[Operation]],
        parent: str | None = None,
    ) -> None:
        """Commit the operations that are still needed given the files of the hub; nothing if there are none.

        Every commit names its parent, so one that was made although its answer was lost cannot be made twice:
        the hub refuses it, and then nothing is needed any more. PublishError if the branch is not at `parent`.
        """
        for _ in self.waits:
            head = self.resolve()
            needed = operations(self.files(head))
            if not needed:
                return
            if parent not in (None, head):
                raise PublishError(f"{self.repo}: cannot commit to it: {ADVICE[412]}")
            try:
                self._patient("commit to it", lambda head=head, needed=needed: self.api.create_commit(
                    self.repo, needed, commit_message=message, parent_commit=head, num_threads=1))
                return
            except PublishError as error:
                if _status(error) not in MOVED:
                    raise
        raise PublishError(f"{self.repo}: cannot commit to it: {ADVICE[412]}")

    def download(self, name: str, revision: str, root: Path) -> None:
        """Fetch one file of a commit into `root`; a file that arrived whole before is not fetched again."""
        self._patient(f"download {name}", lambda: self.api.hf_hub_download(
            self.repo, name, revision=revision, local_dir=root))

    def _patient(self, what: str, call: Callable[[], T]) -> T:
        for wait in (*self.waits, None):
            try:
                return call()
            except (*PASSING, ValueError) as error:
                if wait is None or not may_pass(error):
                    raise PublishError(f"{self.repo}: cannot {what}: {_brief(error)}; {_advice(error)}") from error
                LOG.warning("%s: cannot %s (%s), again in %s s", self.repo, what, _brief(error), wait)
                time.sleep(wait)
        raise AssertionError("the last wait is None")


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed later: not for a refusal, a full disk or a fault in the arguments."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in MAY_PASS
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError | TimeoutError):
        return error.errno not in FULL and not isinstance(error, FileNotFoundError | PermissionError)
    return not isinstance(error, ValueError)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error; uploads wrap it in a RuntimeError."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if response is not None:
            return response.status_code
        error = error.__cause__
    return None


def _brief(error: BaseException) -> str:
    """An error in one line, its cause too where the library wraps it ("Error while uploading ...")."""
    inner = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    return " ".join(str(inner).split())[:300] or type(inner).__name__


def _advice(error: BaseException) -> str:
    status = _status(error)
    if status in ADVICE:
        return ADVICE[status]
    return "run the same command again, finished files are kept" if may_pass(error) else "correct that first"
