"""Any text as a panel: one checkpoint against its source, or two against each other on the same windows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from keys35.calibration.text import read_utf8
from keys35.calibration.windows import read_tokenizer
from keys35.errors import PlanError
from keys35.files.atomic import write_json
from keys35.files.ledger import held
from keys35.files.source import ShardedSource
from keys35.glm.weights import WeightStore
from keys35.progress import Progress
from keys35.runtime.launch import PanelResult, PanelRun, check_judged, open_reference, run_panels
from keys35.runtime.panel import Panel
from keys35.runtime.rank import choose_device
from keys35.runtime.reference import make_reference

COMPARED = ("kl", "kl_reverse", "top1", "top2", "nll")
ROUNDING = 1e-12  # of a window's number, a sum of float64 values
CHARACTERS, SPARE = 8, 1024  # more than a token has, and tokens that a cut behind them does not change


def text_panel(files: Sequence[Path], tokenizer: Path, rows: int, length: int) -> Panel:
    """The first `rows` contiguous windows of `length` tokens of each text; a file's name, or path, is its domain.

    Raises SourceError for an unreadable tokenizer, PlanError when a text is missing, given twice, no UTF-8 or too short
    for its windows.
    """
    twice = sorted(str(file) for file, times in Counter(file.resolve() for file in files).items() if times > 1)
    if twice:
        raise PlanError(f"{', '.join(twice)}: given twice, and standard errors would take its windows for twice the "
                        "text; give every --panel once")
    encoder, windows, domains = read_tokenizer(tokenizer), [], []
    alike = len({file.stem for file in files}) < len(files)  # prose/test.txt and code/test.txt are two domains
    for file in files:
        if not file.is_file():
            raise PlanError(f"{file}: no such text; give a plain text file to --panel")
        ids = _beginning(encoder, read_utf8(file, PlanError), rows * length)
        if len(ids) < rows * length:
            fit = f"at most {len(ids) // length} rows, or shorter ones" if len(ids) >= length else "shorter ones"
            raise PlanError(
                f"{file} has {len(ids):,} tokens; {rows} windows of {length} need {rows * length:,}: "
                f"ask for {fit}, or give more text"
            )
        windows += [torch.tensor(ids[start : start + length]) for start in range(0, rows * length, length)]
        domains += [str(file) if alike else file.stem] * rows
    return Panel.of(", ".join(file.name for file in files), windows, domains)


def _beginning(encoder: Tokenizer, text: str, count: int) -> list[int]:
    """At least the first `count` tokens of a text, or all it has: an encoding takes 170 bytes for each of its text."""
    size = CHARACTERS * count
    while True:
        ids = encoder.encode(text[:size], add_special_tokens=False).ids
        if size >= len(text):
            return ids
        if len(ids) >= count + SPARE:
            return ids[:count]
        size *= 2


def score(
    checkpoints: Sequence[Path],
    reference: Path,
    panel: Panel,
    tp: int,
    scratch: Path,
    progress: Progress,
    *,
    mtp_hidden: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> tuple[list[PanelResult], dict[str, Any]]:
    """Every checkpoint on a panel, with the noise floor of the source, which is streamed only once.

    Raises RankError, SourceError, PlanError, of what is wrong with a checkpoint before the source is streamed, and
    ResumeError when another process uses `scratch`.
    """
    source, config = open_reference(reference, mtp_hidden)
    _refuse_longer(panel, reference, config.max_position_embeddings)
    for path in checkpoints:
        check_judged(path, tp, reference, config.vocab_size)
    place = choose_device(device, 0, 1)
    states = scratch / f"reference-{panel.fingerprint[:12]}"
    results: list[PanelResult] = []
    with held(scratch):  # ranks find their jobs and leave their results there
        for step in progress.walk("panel", ["reference", *(str(path) for path in checkpoints)]):
            if step.unit == "reference":
                store = WeightStore(source, config, device=place, dtype=getattr(torch, dtype))
                noise = make_reference(store, panel, states).facts["noise"]
            else:
                run = PanelRun(panel, states, scratch / f"run-{len(results)}", dtype)
                results += run_panels(step.unit, [run], tp, mtp_hidden=mtp_hidden, device=device)
    return results, noise


def _refuse_longer(panel: Panel, reference: Path, longest: int | None) -> None:
    """Beyond what the source was made for it is no reference."""
    length = max(map(len, panel.tokens))
    if longest and length > longest:
        raise PlanError(f"windows of {length:,} tokens: {reference} was made for texts of at most {longest:,} "
                        "(max_position_embeddings); ask for shorter ones")


def describe(panel: Panel) -> dict[str, Any]:
    """What identifies a panel: numbers of two panels are never compared."""
    return {
        "set": panel.name, "sha256": panel.fingerprint, "windows": len(panel.tokens), "tokens": panel.token_count,
    }  # fmt: skip


def validate_panel(
    out: Path, reference: Path, panel: Panel, tp: int, scratch: Path, progress: Progress, **options: Any
) -> dict[str, Any]:
    """One checkpoint on a panel of any text, as KEYS35_QUALITY.json says it; also written to `scratch`/panel.json."""
    [result], noise = score([out], reference, panel, tp, scratch, progress, **options)
    quality = {
        "panel": describe(panel),
        "noise_floor": noise,
        "metrics": result.metrics,
        "tp": tp,
        "ranks": [{"rank": r["rank"], "bytes_read": r["bytes_read"], **r["bytes_by_class"]} for r in result.ranks],
        "checkpoint_bytes": ShardedSource.open(out).total_size,
        "tp_against_one": None,
    }
    write_json(scratch / "panel.json", quality)
    return quality | {"timing": {"seconds": result.seconds}}


def compare(
    first: Path, second: Path, reference: Path, panel: Panel, tp: int, scratch: Path, progress: Progress, **options: Any
) -> dict[str, Any]:
    """Two checkpoints on the same panel: what each loses, and the paired differences; `scratch`/compare.json.

    A difference is second minus first; its standard error is over windows, which are drawn apart, not over tokens,
    whose errors hang together, and within domains, whose windows are counted out.
    """
    results, noise = score([first, second], reference, panel, tp, scratch, progress, **options)
    found = {
        "panel": describe(panel),
        "noise_floor": noise,
        "checkpoints": [str(first), str(second)],
        "bytes": [ShardedSource.open(path).total_size for path in (first, second)],
        "metrics": [_headline(result.metrics) for result in results],
        "differences": {name: paired(results, name) for name in COMPARED},
        "domains": {
            domain: {name: paired(results, name, domain) for name in ("kl", "top1")}
            for domain in dict.fromkeys(panel.domains)
        },
    }
    write_json(scratch / "compare.json", found)
    return found


def _headline(metrics: Mapping[str, Any]) -> dict[str, float]:
    names = ("kl", "kl_reverse", "kl_median", "kl_p90", "kl_p99", "top1", "top2", "top5", "ppl", "ppl_reference")
    return {name: metrics[name] for name in names}


def _of_window(window: Mapping[str, Any], name: str) -> float:
    return math.log(window["ppl"]) if name == "nll" else window[name]


def paired(results: Sequence[PanelResult], name: str, domain: str | None = None) -> dict[str, float | None]:
    """Mean over windows of second minus first, its standard error (None for one window), and their ratio.

    Differences that only rounding tells apart have an error of 0, and no ratio.
    """
    windows = zip(*(result.metrics["per_window"] for result in results), strict=True)
    pairs = [pair for pair in windows if domain in (None, pair[0]["domain"])]
    first, second = torch.tensor([[_of_window(one, name) for one in pair] for pair in pairs], dtype=torch.double).T
    apart = second - first
    error = _standard_error(apart, [pair[0]["domain"] for pair in pairs])
    if error and error < ROUNDING * float(torch.maximum(first.abs(), second.abs()).max()):
        error = 0.0
    mean = float(apart.mean())
    return {"mean": mean, "standard_error": error, "z": mean / error if error else None}


def _standard_error(apart: Tensor, domains: Sequence[str]) -> float | None:
    """Of the mean of windows' differences (windows,), where each domain's number of windows was chosen, not drawn.

    So what domains differ by is no chance, and each is held against its own mean; unless one has a single window.
    """
    parts = [apart[[one == domain for one in domains]] for domain in dict.fromkeys(domains)]
    if min(map(len, parts)) < 2:
        parts = [apart]
    if len(parts[0]) < 2:
        return None
    return float(sum(len(part) * part.var() for part in parts)) ** 0.5 / len(apart)
