"""Ranks of this machine under torchrun: they load while other work goes on and wait for their jobs."""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from keys35.errors import RankError
from keys35.files.atomic import read_json
from keys35.runtime.rank import JOBS, RankJob, save_jobs

log = logging.getLogger(__name__)

SHUTDOWN_S = 15
# glibc would otherwise keep freed activations: 460 MB a rank instead of 310 on the demo panel.
_TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
_AGAIN = "run the panel again"


class RankGroup:
    """`tp` processes that share a folder with us: their log, their reports and their errors are in it."""

    def __init__(
        self, folder: Path, tp: int, *, device: str = "auto", timeout_s: float = 300.0, port: int | None = None
    ) -> None:
        """Start them; they load and then wait. Raises RankError if the port is taken."""
        self.folder, self.tp = folder, tp
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("rank-*.json"), folder / JOBS]:
            stale.unlink(missing_ok=True)
        meet = ["--standalone", "--local-addr=127.0.0.1"]
        if port is not None:
            _require_free(port)
            meet = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        logs = folder / "torchrun"  # which it makes for every start, in /tmp otherwise, and leaves there
        shutil.rmtree(logs, ignore_errors=True)
        command = [sys.executable, "-m", "torch.distributed.run", *meet, f"--nproc-per-node={tp}", f"--log-dir={logs}"]
        command += ["-m", "keys35.runtime", str(folder), str(os.getpid()), device, str(timeout_s)]
        log.info("starting %d ranks, their output goes to %s", tp, folder / "ranks.log")
        with open(folder / "ranks.log", "wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
            )

    def check(self) -> None:
        """Raise RankError, saying why, if they have ended although nobody gave them jobs."""
        code = self._process.poll()
        if code is not None:
            raise RankError(_failure(self.folder, self.tp, code))

    def give(self, jobs: Sequence[RankJob]) -> None:
        """Let them start on jobs, in order; they end after the last one."""
        save_jobs(self.folder / JOBS, jobs)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until they have done their jobs. Raises RankError when they fail or take too long."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RankError(
                f"{self.tp} ranks did not finish within {limit_s:g} s; see {self.folder}/ranks.log"
            ) from None
        finally:
            self.close()
        if code:
            raise RankError(_failure(self.folder, self.tp, code))

    def close(self) -> None:
        """End torchrun and, through it, its ranks; kill their session if that takes too long."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _environment() -> dict[str, str]:
    # All ranks are on this machine, so they need no network interface but the loopback one.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | _TIGHT_MALLOC | os.environ
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return environment


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RankError(f"port {port} cannot be used ({error.strerror}); choose another one") from None


def _failure(out: Path, tp: int, code: int) -> str:
    """Why a job failed, from the ranks' own words: a refusal first, then a killed rank, then any error.

    code: torchrun's exit code, minus a signal's number where one ended it.
    """
    errors = [read_json(path, RankError, _AGAIN) for path in out.glob("rank-*.error.json")]
    errors.sort(key=lambda error: (not error["known"], error["time"]))
    text = (out / "ranks.log").read_text(errors="replace")
    if errors and errors[0]["known"]:
        return f"rank {errors[0]['rank']} of {tp}: {errors[0]['message']}"
    if killed := _killed(text):
        rank, sign = killed
        guess = " (out of memory?)" if sign == signal.SIGKILL else ""
        return f"rank {rank} of {tp} was killed by signal {sign}{guess}; see {out}/ranks.log"
    if errors:
        return f"rank {errors[0]['rank']} of {tp} failed: {errors[0]['message']}; see {out}/ranks.log"
    if code < 0:
        return f"torchrun, which starts the ranks, was killed by signal {-code}; see {out}/ranks.log"
    return f"the ranks did not start; the end of {out}/ranks.log says: {text[-500:].strip()}"


def _killed(text: str) -> tuple[int, int] | None:
    """The first rank that a signal ended, and which, by torchrun's words; it ends the others itself, by SIGTERM."""
    death = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*-(\d+)")
    found = [(int(rank), int(sign)) for rank, sign in death.findall(text)]
    first = death.search(text.rpartition("Root Cause")[2])
    others = [one for one in found if one[1] != signal.SIGTERM]
    return others[0] if others else (int(first[1]), int(first[2])) if first else None
