"""One rank of the tensor-parallel runtime, which `keys35.runtime` starts.

Needs only torch, safetensors and numpy, so that a rank starts fast and stays small.
"""

import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keys35.errors import Keys35Error, RankError
from keys35.files.atomic import read_json, write_json
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import check_tp
from keys35.glm.weights import WeightStore
from keys35.runtime.generate import Decoder, Drafter, Drafting, generate, generate_drafted
from keys35.runtime.panel import Panel
from keys35.runtime.ranks import GroupRanks, LostRankError, Ranks
from keys35.runtime.readable import require_readable
from keys35.runtime.reference import Reference
from keys35.runtime.score import score_panel

JOBS, POLL_S, WATCH_S = "jobs.json", 0.02, 0.5
ORPHANED = 3
MOST_THREADS = 4  # products this small gain nothing from more


@dataclass(frozen=True)
class RankJob:
    """What all ranks are asked to do; given to them as JSON.

    checkpoint may contain "{rank}", for nodes that hold copies under different paths. With `panel` and
    `reference` the job scores the panel; with `prompt` it generates `new_tokens` tokens, with `draft` by way of the MTP
    layer, fewer if the model ends its text unless `past_end`; results go to `out`.
    """

    checkpoint: str
    out: str
    panel: str | None = None
    reference: str | None = None
    save_logits: bool = False
    prompt: tuple[int, ...] = ()
    new_tokens: int = 0
    draft: bool = False
    past_end: bool = False
    mtp_hidden: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    timeout_s: float = 300.0


def checkpoint_of(pattern: Path | str, rank: int) -> Path:
    """A rank's checkpoint; "{rank}" alone stands for its number, other braces are a path's own."""
    return Path(str(pattern).replace("{rank}", str(rank)))


def save_jobs(path: Path, jobs: Sequence[RankJob]) -> None:
    """Write jobs for ranks that wait for them."""
    write_json(path, [asdict(job) for job in jobs])


def _end_with(launcher: int) -> None:
    """End when the process that started the ranks does, also in the middle of a job: nobody would read its result, and
    the ranks of the next attempt need the memory. torchrun has a session of its own, and goes on.
    """

    def watch() -> None:
        while Path(f"/proc/{launcher}").exists():
            time.sleep(WATCH_S)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def _awaited_jobs(path: Path) -> list[RankJob]:
    """Jobs, once they are there."""
    while not path.exists():
        time.sleep(POLL_S)
    stored = read_json(path, RankError, "start the runtime again")
    return [RankJob(**job | {"prompt": tuple(job["prompt"])}) for job in stored]


def run_job(job: RankJob, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Do one rank's part of a job, write its rank-N.json and, on rank 0, result.json; returns the result."""
    started, out = time.monotonic(), Path(job.out)
    for stale in [out / f"rank-{ranks.rank}.json", *([out / "result.json"] if ranks.rank == 0 else [])]:
        stale.unlink(missing_ok=True)  # an earlier job's figures are not this one's, should it fail
    source = ShardedSource.open(checkpoint_of(job.checkpoint, ranks.rank))
    _agree_on_checkpoint(source, ranks, device)
    config = GlmConfig.from_dict(source.config, job.mtp_hidden)
    if job.past_end:
        config = replace(config, eos_token_ids=())
    check_tp(config, ranks.world)
    require_readable(source, config, mtp=job.draft or job.panel is not None)
    dtype = getattr(torch, job.dtype)
    store = WeightStore(source, config, device=device, dtype=dtype, tp=ranks.world, rank=ranks.rank)
    result: dict[str, Any] = {}
    rates: dict[str, float] = {}
    if job.panel and job.reference:
        result["metrics"] = _scores(job, ranks, store)
    if job.prompt:
        result |= _reply(job, _decoder(job, ranks, store), store, rates)
    if ranks.rank == 0:
        write_json(out / "result.json", result)
    report = {
        "rank": ranks.rank,
        "device": str(device),
        "backend": ranks.backend,
        "communication_s": ranks.communication_s,
        **rates,
        "bytes_read": source.bytes_read,
        "bytes_by_class": dict(store.read),
        "peak_rss_bytes": peak_rss_bytes(),
        "seconds": time.monotonic() - started,
    }
    if device.type == "cuda":
        report["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(device)
    write_json(out / f"rank-{ranks.rank}.json", report)
    return result


def _scores(job: RankJob, ranks: Ranks, store: WeightStore) -> dict[str, Any] | None:
    panel = Panel.load(Path(job.panel))
    panel.check_vocabulary(store.config.vocab_size)
    logits_dir = Path(job.out) / "logits" if job.save_logits else None
    return score_panel(store.in_shares(), ranks, panel, Reference.open(Path(job.reference), panel), logits_dir)


def _decoder(job: RankJob, ranks: Ranks, store: WeightStore) -> Decoder:
    """The whole model in memory; raises RankError for a prompt with tokens that it does not have."""
    if max(job.prompt) >= store.config.vocab_size:
        raise RankError(
            f"the prompt has token {max(job.prompt)}, the model's vocabulary ends at {store.config.vocab_size - 1}; "
            f"copy the source's tokenizer.json into {store.source.root}"
        )
    fast = store.device.type == "cuda" and store.dtype != torch.float32  # whole products, straight from the trellis
    return Decoder(store if fast else store.in_shares(), ranks)


def _reply(job: RankJob, decoder: Decoder, store: WeightStore, rates: dict[str, float]) -> dict[str, Any]:
    """Generate; fills in tokens a second of the prompt (up to the first new token) and of decoding."""
    drafting = Drafting()
    if job.draft and not decoder.config.num_nextn_predict_layers:
        raise RankError(f"{job.checkpoint} has no MTP layer to draft with; generate without drafts")
    if job.draft:
        drafter = Drafter(store, decoder)
        stream = generate_drafted(decoder, drafter, job.prompt, job.new_tokens, drafting)
    else:
        stream = generate(decoder, job.prompt, job.new_tokens)
    decoder.ranks.meet(store.device)  # a rank that still loads would make the others' prompts look slow
    tokens, marks = [], [time.perf_counter()]
    for token in stream:
        tokens.append(token)
        marks.append(time.perf_counter())
    if tokens:
        rates["prefill_tokens_s"] = len(job.prompt) / (marks[1] - marks[0])
    if len(tokens) > 1:
        rates["decode_tokens_s"] = (len(tokens) - 1) / (marks[-1] - marks[1])
    return {"tokens": tokens, "drafts": drafting.drafts, "accepted": drafting.accepted}


def _agree_on_checkpoint(source: ShardedSource, ranks: Ranks, device: torch.device) -> None:
    """Refuse to run when ranks opened different checkpoints: their slices would sum up to noise."""
    # Copies on other nodes have other modification times, which end the fingerprint of large files.
    prints = [f"{file}: {text.split(', mtime')[0]}" for file, text in sorted(source.fingerprint().items())]
    mine = hashlib.sha256("\n".join(prints).encode()).digest()
    everyone = ranks.all(torch.tensor(list(mine), dtype=torch.uint8, device=device))
    others = [rank for rank, digest in enumerate(everyone) if not torch.equal(digest, everyone[0])]
    if others:
        raise RankError(
            f"ranks {others} opened another checkpoint than rank 0 (here: {source.root}); "
            "give every rank the same files"
        )


def peak_rss_bytes() -> int:
    """This process's peak resident memory. Not getrusage: that one remembers the parent before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def choose_device(name: str, local_rank: int, local_world: int) -> torch.device:
    """ "auto" is this rank's own GPU when there are enough for all ranks of the node, else the CPU.

    With "cuda", ranks share what GPUs there are. Raises RankError when there is none.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count >= local_world else "cpu"
    if name == "cuda" and not count:
        raise RankError(f"no GPU is visible; {local_world} rank(s) need a GPU each or share one: use --device cpu")
    return torch.device("cuda", local_rank % count) if name == "cuda" else torch.device(name)


def choose_backend(device: torch.device, local_world: int) -> str:
    """NCCL between GPUs, gloo on CPUs or when ranks share a GPU, which NCCL refuses."""
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= local_world else "gloo"


def main() -> int:
    """What a rank does under torchrun: load, wait for jobs.json in the folder, do its jobs one after the other.

    A failure leaves rank-N.error.json in the folder for the launcher to read.
    """
    folder, launcher, device_name, timeout_s = sys.argv[1:]
    _end_with(int(launcher))
    out, rank = Path(folder), int(os.environ["RANK"])
    (out / f"rank-{rank}.error.json").unlink(missing_ok=True)  # of an earlier start, where no launcher tidies up
    write_json(out / f"rank-{rank}.pid.json", {"pid": os.getpid()})
    try:
        local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        device = choose_device(device_name, local_rank, local_world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // local_world)))
        ranks = GroupRanks(choose_backend(device, local_world), float(timeout_s))
        for job in _awaited_jobs(out / JOBS):
            run_job(job, ranks, device)
        ranks.close()
    except Exception as error:
        known = isinstance(error, Keys35Error) and not isinstance(error, LostRankError)  # a consequence, no cause
        message = str(error) if known else f"{type(error).__name__}: {error}"
        write_json(
            out / f"rank-{rank}.error.json",
            {"rank": rank, "known": known, "message": message, "time": time.time()},
        )
        traceback.print_exc()
        return 1
    return 0
