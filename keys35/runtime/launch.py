"""Start the tensor-parallel runtime and collect what its ranks report."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keys35.errors import RankError, SourceError
from keys35.files.atomic import read_json
from keys35.glm.config import GlmConfig
from keys35.glm.names import check_tp
from keys35.runtime.panel import Panel
from keys35.runtime.rank import RankJob, choose_device, run_job
from keys35.runtime.ranks import Ranks

log = logging.getLogger(__name__)

SHUTDOWN_S = 15
# glibc would otherwise keep freed activations: 460 MB a rank instead of 310 on the demo panel.
_TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
_AGAIN = "run the panel again"


@dataclass(frozen=True)
class PanelResult:
    """Metrics of a checkpoint on a panel (see PanelMetrics.result), each rank's report, seconds in all."""

    metrics: dict[str, Any]
    ranks: tuple[dict[str, Any], ...]
    seconds: float


@dataclass(frozen=True)
class PanelRun:
    """A panel to score against a reference, and where to; logits go to out_dir/logits when `save_logits`."""

    panel: Panel
    reference_dir: Path
    out_dir: Path
    dtype: str = "float32"
    save_logits: bool = False


@dataclass(frozen=True)
class Generated:
    """Greedy tokens after a prompt, each rank's report, seconds in all."""

    tokens: tuple[int, ...]
    ranks: tuple[dict[str, Any], ...]
    seconds: float


def run_panel(
    checkpoint: Path | str,
    panel: Panel,
    reference_dir: Path,
    tp: int,
    out_dir: Path,
    *,
    mtp_hidden: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    save_logits: bool = False,
    timeout_s: float = 300.0,
    limit_s: float | None = None,
    port: int | None = None,
) -> PanelResult:
    """Score a checkpoint on one panel; see `run_panels`."""
    run = PanelRun(panel, reference_dir, out_dir, dtype, save_logits)
    return run_panels(
        checkpoint, [run], tp, mtp_hidden=mtp_hidden, device=device, timeout_s=timeout_s, limit_s=limit_s, port=port
    )[0]


def run_panels(
    checkpoint: Path | str,
    runs: Sequence[PanelRun],
    tp: int,
    *,
    mtp_hidden: str | None = None,
    device: str = "auto",
    timeout_s: float = 300.0,
    limit_s: float | None = None,
    port: int | None = None,
) -> list[PanelResult]:
    """Score a checkpoint on panels with `tp` ranks, started once (one rank runs in this process, without torchrun).

    `timeout_s` bounds every exchange between ranks, `limit_s` all of it. Raises RankError, never hangs, when a rank
    dies, disagrees or cannot open its port.
    """
    jobs = []
    for run in runs:
        run.out_dir.mkdir(parents=True, exist_ok=True)
        run.panel.save(run.out_dir / "panel.json")
        jobs.append(RankJob(
            checkpoint=str(checkpoint),
            out=str(run.out_dir),
            panel=str(run.out_dir / "panel.json"),
            reference=str(run.reference_dir),
            save_logits=run.save_logits,
            mtp_hidden=mtp_hidden,
            device=device,
            dtype=run.dtype,
            timeout_s=timeout_s,
        ))
    done = launch(jobs, tp, limit_s=limit_s, port=port)
    return [PanelResult(result["metrics"], ranks, seconds) for result, ranks, seconds in done]


def run_generate(
    checkpoint: Path | str,
    prompt: Sequence[int],
    new_tokens: int,
    tp: int,
    out_dir: Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    timeout_s: float = 300.0,
    limit_s: float | None = None,
    port: int | None = None,
) -> Generated:
    """Generate greedily after a prompt of token ids; arguments and errors as for `run_panel`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    if not prompt:
        raise RankError("the prompt is empty; give at least one token")
    job = RankJob(
        checkpoint=str(checkpoint),
        out=str(out_dir),
        prompt=tuple(prompt),
        new_tokens=new_tokens,
        device=device,
        dtype=dtype,
        timeout_s=timeout_s,
    )
    [(result, ranks, seconds)] = launch([job], tp, limit_s=limit_s, port=port)
    return Generated(tuple(result["tokens"]), ranks, seconds)


def launch(
    jobs: Sequence[RankJob], tp: int, *, limit_s: float | None = None, port: int | None = None
) -> list[tuple[dict[str, Any], tuple[dict[str, Any], ...], float]]:
    """Run jobs, one after the other, on the same `tp` ranks of this machine.

    Returns each one's result, its ranks' reports and its seconds, the first one's with the ranks' start.
    """
    started, outs = time.monotonic(), [Path(job.out) for job in jobs]
    for job, out in zip(jobs, outs, strict=True):
        _check_ranks(job, tp)
        for stale in [*out.glob("rank-*.json"), out / "result.json"]:
            stale.unlink(missing_ok=True)
        job.save(out / "job.json")
    if tp == 1:
        device = choose_device(jobs[0].device, 0, 1)
        for job in jobs:
            run_job(job, Ranks(), device)
    else:
        _torchrun(outs, tp, limit_s, port)
    results = [read_json(out / "result.json", RankError, _AGAIN) for out in outs]
    ranks = [tuple(read_json(out / f"rank-{rank}.json", RankError, _AGAIN) for rank in range(tp)) for out in outs]
    seconds = [max(report["seconds"] for report in reports) for reports in ranks]
    seconds[0] = time.monotonic() - started - sum(seconds[1:])
    return list(zip(results, ranks, seconds, strict=True))


def _check_ranks(job: RankJob, tp: int) -> None:
    """Refuse an impossible split from the config alone, before any process starts."""
    config = Path(job.checkpoint.format(rank=0)) / "config.json"
    check_tp(GlmConfig.from_dict(read_json(config, SourceError, "give a checkpoint's folder")), tp)


def _torchrun(outs: Sequence[Path], tp: int, limit_s: float | None, port: int | None) -> None:
    out = outs[0]
    meet = ["--standalone", "--local-addr=127.0.0.1"]
    if port is not None:
        _require_free(port)
        meet = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *meet, f"--nproc-per-node={tp}"]
    command += ["-m", "keys35.runtime.rank", *(str(folder / "job.json") for folder in outs)]
    # All ranks are on this machine, so they need no network interface but the loopback one.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | _TIGHT_MALLOC | os.environ
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    log.info("starting %d ranks, their output goes to %s", tp, out / "ranks.log")
    with open(out / "ranks.log", "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RankError(f"{tp} ranks did not finish within {limit_s:g} s; see {out}/ranks.log") from None
        finally:
            _stop(process)
    if code:
        raise RankError(_failure(out, tp))


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RankError(f"port {port} cannot be used ({error.strerror}); choose another one") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and, through it, its ranks; kill their session if that takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(out: Path, tp: int) -> str:
    """Why a job failed, from the ranks' own words: a refusal first, then a killed rank, then any error."""
    errors = [read_json(path, RankError, _AGAIN) for path in out.glob("rank-*.error.json")]
    errors.sort(key=lambda error: (not error["known"], error["time"]))
    text = (out / "ranks.log").read_text(errors="replace")
    deaths = re.findall(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*-(\d+)", text)
    killed = [(rank, sign) for rank, sign in deaths if int(sign) != signal.SIGTERM]  # torchrun ends the rest
    if errors and errors[0]["known"]:
        return f"rank {errors[0]['rank']} of {tp}: {errors[0]['message']}"
    if killed:
        rank, sign = killed[0]
        return f"rank {rank} of {tp} was killed by signal {sign} (out of memory?); see {out}/ranks.log"
    if errors:
        return f"rank {errors[0]['rank']} of {tp} failed: {errors[0]['message']}; see {out}/ranks.log"
    return f"the ranks did not start; the end of {out}/ranks.log says: {text[-500:].strip()}"
