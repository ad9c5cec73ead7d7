"""Start the tensor-parallel runtime and collect what its ranks report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keys35.errors import PlanError, RankError, SourceError
from keys35.files.atomic import read_json
from keys35.files.forms import OBJECT, read_formed
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig, refuse_encoded
from keys35.glm.names import check_tp, match_source
from keys35.runtime.group import RankGroup
from keys35.runtime.panel import Panel
from keys35.runtime.rank import RankJob, checkpoint_of, choose_device, run_job
from keys35.runtime.ranks import Ranks
from keys35.runtime.readable import require_readable

_AGAIN = "run the panel again"


@dataclass(frozen=True)
class Done:
    """What became of a job: its result, its ranks' reports, and the seconds of the slowest."""

    result: dict[str, Any]
    ranks: tuple[dict[str, Any], ...]
    seconds: float


@dataclass(frozen=True)
class PanelResult:
    """Metrics of a checkpoint on a panel (see PanelMetrics.result), each rank's report, seconds of the slowest."""

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
    """Greedy tokens after a prompt, drafts made and accepted, each rank's report, seconds of the slowest."""

    tokens: tuple[int, ...]
    drafts: int
    accepted: int
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
    jobs = panel_jobs(checkpoint, runs, mtp_hidden=mtp_hidden, device=device, timeout_s=timeout_s)
    return panel_results(launch(jobs, tp, limit_s=limit_s, port=port))


def panel_jobs(
    checkpoint: Path | str,
    runs: Sequence[PanelRun],
    *,
    mtp_hidden: str | None = None,
    device: str = "auto",
    timeout_s: float = 300.0,
) -> list[RankJob]:
    """What ranks are asked for to score panels; each panel is written to its folder."""
    for run in runs:
        run.panel.save(run.out_dir / "panel.json")
    return [
        RankJob(
            checkpoint=str(checkpoint),
            out=str(run.out_dir),
            panel=str(run.out_dir / "panel.json"),
            reference=str(run.reference_dir),
            save_logits=run.save_logits,
            mtp_hidden=mtp_hidden,
            device=device,
            dtype=run.dtype,
            timeout_s=timeout_s,
        )
        for run in runs
    ]


def panel_results(done: Sequence[Done]) -> list[PanelResult]:
    """Results of the jobs of `panel_jobs`."""
    return [PanelResult(one.result["metrics"], one.ranks, one.seconds) for one in done]


def run_generate(
    checkpoint: Path | str,
    prompt: Sequence[int],
    new_tokens: int,
    tp: int,
    out_dir: Path,
    *,
    draft: bool = False,
    past_end: bool = False,
    mtp_hidden: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    timeout_s: float = 300.0,
    limit_s: float | None = None,
    port: int | None = None,
) -> Generated:
    """Generate greedily after a prompt of token ids; with `draft` the MTP layer guesses the token after the next.

    Ends before an end-of-sequence token, unless it is to go `past_end`.
    Other arguments and errors as for `run_panel`.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    if not prompt:
        raise RankError("the prompt is empty; give at least one token")
    job = RankJob(
        checkpoint=str(checkpoint),
        out=str(out_dir),
        prompt=tuple(prompt),
        new_tokens=new_tokens,
        draft=draft,
        past_end=past_end,
        mtp_hidden=mtp_hidden,
        device=device,
        dtype=dtype,
        timeout_s=timeout_s,
    )
    [done] = launch([job], tp, limit_s=limit_s, port=port)
    found = done.result
    return Generated(tuple(found["tokens"]), found["drafts"], found["accepted"], done.ranks, done.seconds)


def launch(
    jobs: Sequence[RankJob], tp: int, *, limit_s: float | None = None, port: int | None = None
) -> list[Done]:
    """Run jobs, one after the other, on the same `tp` ranks of this machine, the first one's device and time limit."""
    for job in jobs:
        check_ranks(job.checkpoint, tp)
    group = None
    if tp > 1:
        first = jobs[0]
        group = RankGroup(Path(first.out), tp, device=first.device, timeout_s=first.timeout_s, port=port)
    return Running(jobs, tp, group).results(limit_s)


class Running:
    """Jobs that ranks are at work on; without a group, one rank does them in this process when asked for results."""

    def __init__(self, jobs: Sequence[RankJob], tp: int, group: RankGroup | None) -> None:
        self._jobs, self._tp, self._group = jobs, tp, group
        self._outs = [Path(job.out) for job in jobs]
        for out in self._outs:
            out.mkdir(parents=True, exist_ok=True)
            for stale in [*out.glob("rank-*[0-9].json"), out / "result.json"]:
                stale.unlink(missing_ok=True)
        if group:
            group.give(jobs)

    def results(self, limit_s: float | None = None) -> list[Done]:
        """Wait for all of them. Raises RankError, never hangs, when a rank dies, disagrees or is late."""
        if self._group:
            self._group.wait(limit_s)
        else:
            device = choose_device(self._jobs[0].device, 0, 1)
            for job in self._jobs:
                run_job(job, Ranks(), device)
        return [self._read(out) for out in self._outs]

    def _read(self, out: Path) -> Done:
        ranks = tuple(read_json(out / f"rank-{rank}.json", RankError, _AGAIN) for rank in range(self._tp))
        result = read_json(out / "result.json", RankError, _AGAIN)
        return Done(result, ranks, max(report["seconds"] for report in ranks))


def check_ranks(checkpoint: Path | str, tp: int) -> None:
    """Refuse (PlanError) an impossible split from the config alone, before any process starts."""
    config = checkpoint_of(checkpoint, 0) / "config.json"
    check_tp(GlmConfig.from_dict(read_formed(config, OBJECT, SourceError, "give a checkpoint's folder")), tp)


def open_reference(root: Path, mtp_hidden: str | None) -> tuple[ShardedSource, GlmConfig]:
    """Open what a checkpoint is judged against, from headers alone; FP8 may be judged against BF16.

    Raises SourceError for one that is itself encoded, or whose tensors are not those of its config.
    """
    source = ShardedSource.open(root, fp8=None)
    refuse_encoded(source.config, root, source.tensors)
    config = GlmConfig.from_dict(source.config, mtp_hidden=mtp_hidden)
    match_source(config, {name: (tensor.entry.dtype, tensor.entry.shape) for name, tensor in source.tensors.items()})
    return source, config


def check_judged(checkpoint: Path, tp: int, reference: Path, vocabulary: int) -> None:
    """Refuse a checkpoint that ranks could not hold against a reference with this many tokens, from headers alone.

    Raises PlanError for a split or a vocabulary that does not fit, SourceError for files or tensors that are missing or
    cut.
    """
    check_ranks(checkpoint, tp)
    source = ShardedSource.open(checkpoint)
    config = GlmConfig.from_dict(source.config)
    require_readable(source, config)
    size = config.vocab_size
    if size != vocabulary:
        raise PlanError(f"{checkpoint} has a vocabulary of {size}, {reference} one of {vocabulary}: it was not made "
                        "from it")
