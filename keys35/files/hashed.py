"""Writing a file and hashing it at the same time."""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Protocol, Self

WRITE_BEHIND_BYTES = 1 << 26


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Go on with more bytes."""


class Hashed:
    """A file whose pieces are hashed beside being written, and whose pages leave the cache once they are on disk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self._written = self._told = 0
        self._beside = ThreadPoolExecutor(1, "hashing")
        self._hashing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self._beside.shutdown()

    def wait(self) -> None:
        """Until the digests have everything; a piece waits for the one before it, so that no more than one is held."""
        if self._hashing is not None:
            self._hashing.result()

    def write(self, piece: bytes | memoryview, own: Digest | None = None) -> None:
        """own: the digest of the tensor that the piece is of, where it has one."""
        self.wait()
        self._hashing = self._beside.submit(self._hash, piece, own)
        self._file.write(piece)
        self._written += len(piece)
        if self._written - self._told >= WRITE_BEHIND_BYTES:
            # Linux starts to write dirty pages of the range and drops clean ones; nothing waits.
            os.posix_fadvise(self._file.fileno(), 0, self._written, os.POSIX_FADV_DONTNEED)
            self._told = self._written

    def _hash(self, piece: bytes | memoryview, own: Digest | None) -> None:
        self.digest.update(piece)
        if own is not None:
            own.update(piece)
