"""One rank's start, under torchrun: `torchrun ... -m keys35.runtime FOLDER LAUNCHER DEVICE TIMEOUT_S`."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
ORPHANED = 3


def ancestors() -> Iterator[int]:
    """Processes that this one descends from, the nearest first, as far as they are there."""
    process = os.getppid()
    while process:
        yield process
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return
        process = int(stat.rpartition(")")[2].split()[1])


if __name__ == "__main__":
    # Before torch is imported, which takes seconds: a rank whose torchrun ends meanwhile would wait for its peers.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if int(sys.argv[2]) not in ancestors():
        sys.exit(ORPHANED)
    from keys35.runtime.rank import main

    sys.exit(main())
