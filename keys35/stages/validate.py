"""Validate: what a finished checkpoint lost against its BF16 source, as the tensor-parallel runtime sees it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from keys35.calibration.text import load_text_set
from keys35.calibration.windows import WindowMaker, shares
from keys35.errors import ContractError, PlanError, RankError, RecipeError
from keys35.exl3.viterbi import backend_device
from keys35.files.atomic import read_json, write_json
from keys35.files.forms import OBJECT, read_formed
from keys35.files.headers import read_header
from keys35.files.ledger import held
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.weights import WeightStore
from keys35.progress import Progress
from keys35.recipe import Recipe, set_name, stored_recipe
from keys35.report.facts import QUALITY, REPORT
from keys35.runtime.group import RankGroup
from keys35.runtime.launch import (
    PanelResult,
    PanelRun,
    Running,
    check_judged,
    open_reference,
    panel_jobs,
    panel_results,
    run_panels,
)
from keys35.runtime.panel import Panel
from keys35.runtime.reference import FACTS, LOGIT_ROWS, make_reference

LOGIT_TOLERANCE, KL_TOLERANCE = 1e-3, 1e-5
_PANELS: dict[tuple, Panel] = {}  # the last one: a run asks for its panel four times


def recipe_of(out: Path) -> Recipe:
    """The recipe a finished checkpoint was made by, from its report; raises ContractError if that cannot be read."""
    report = read_formed(out / REPORT, OBJECT, ContractError, "it is no keys35 checkpoint, or its report is damaged")
    return stored_recipe(report.get("recipe"), ContractError, out / REPORT)


def validate(
    out: Path, reference: Path, recipe: Recipe, tp: int, scratch: Path, progress: Progress
) -> dict[str, Any]:
    """Score `out` on the recipe's held-out panel with `tp` ranks, and hold them against one process.

    The reference's states are kept in `scratch` and reused. Writes KEYS35_QUALITY.json (no times in it) into `out`.
    Raises RankError (also when ranks and one process disagree), SourceError, PlanError, and ResumeError when another
    process uses `scratch`.
    """
    _require_writable(out)
    with held(scratch), ranks_ahead(scratch, tp) as group:
        return Validation(out, reference, recipe, tp, scratch, group, progress).finish(progress)


def _require_writable(out: Path) -> None:
    """Known before anything begins, and not when the ranks are done."""
    if not os.access(out, os.W_OK):
        raise PlanError(f"{out} cannot be written, and {QUALITY} goes there: make it writable, or give a text with "
                        "--panel, whose results go to --scratch")


@contextmanager
def ranks_ahead(scratch: Path, tp: int) -> Iterator[RankGroup | None]:
    """Ranks that load while other work goes on; None when one rank is enough, which runs in this process."""
    if tp == 1:
        yield None
        return
    group = RankGroup(scratch / "ranks", tp)
    try:
        yield group
    finally:
        group.close()


class Validation:
    """A validation whose ranks are at work while its maker goes on with something else."""

    def __init__(
        self, out: Path, reference: Path, recipe: Recipe, tp: int, scratch: Path, group: RankGroup | None,
        progress: Progress,
    ) -> None:
        """Make the reference and give the ranks their jobs; a rank that has died meanwhile is told of at once."""
        _require_writable(out)
        source, config = open_reference(reference, recipe.mtp.hidden)
        check_judged(out, tp, reference, config.vocab_size)
        store = WeightStore(source, config, device=backend_device(recipe.encoder.backend))
        self.out, self.tp, self.scratch, self.hidden = out, tp, scratch, recipe.mtp.hidden
        self.panel, self.set = _panel_of(out, reference, config, recipe), set_name(recipe.panel.set)
        self.runs = [PanelRun(self.panel, scratch / "reference", scratch / f"tp-{tp}")]
        for _ in progress.walk("reference", [recipe.panel.set]):
            watch = group.check if group else None
            make_reference(store, self.panel, scratch / "reference", watch=watch)
            if tp > 1:
                self.runs.append(_few_windows(store, self.panel, scratch / "against-one", tp, watch))
        self.running = Running(panel_jobs(out, self.runs, mtp_hidden=self.hidden), tp, group)

    def finish(self, progress: Progress) -> dict[str, Any]:
        """Wait for the ranks, hold them against one process, write KEYS35_QUALITY.json; see `validate`."""
        against = None
        for step in progress.walk("validate", [f"tp-{self.tp}", *(["one process"] if self.tp > 1 else [])]):
            if step.unit != "one process":
                scored = panel_results(self.running.results())[0]
            else:
                against = self._against_one_process(scored)
        quality = _quality(self, scored, against)
        write_json(self.out / QUALITY, quality)
        timing = {"seconds": scored.seconds, "peak_rss_bytes": [r["peak_rss_bytes"] for r in scored.ranks]}
        return quality | {"timing": timing}

    def _against_one_process(self, scored: PanelResult) -> dict[str, float]:
        # On the ranks' kind of device: another one rounds rotations differently, and near-ties fall elsewhere.
        kind = scored.ranks[0]["device"].partition(":")[0]
        few, proof = self.runs[1], self.scratch / "against-one"
        run_panels(self.out, [replace(few, out_dir=proof / "1")], 1, mtp_hidden=self.hidden, device=kind)
        return _agreement(few.panel, proof, self.tp)


def _quality(done: Validation, scored: PanelResult, against: dict[str, float] | None) -> dict[str, Any]:
    return {
        "panel": {
            "set": done.set,
            "sha256": done.panel.fingerprint,
            "windows": len(done.panel.tokens),
            "tokens": done.panel.token_count,
        },
        "noise_floor": read_json(done.scratch / "reference" / FACTS)["noise"],
        "metrics": scored.metrics,
        "tp": done.tp,
        "ranks": [{"rank": r["rank"], "bytes_read": r["bytes_read"], **r["bytes_by_class"]} for r in scored.ranks],
        "checkpoint_bytes": ShardedSource.open(done.out).total_size,
        "tp_against_one": against,
    }


def _few_windows(
    store: WeightStore, panel: Panel, proof: Path, tp: int, watch: Callable[[], None] | None
) -> PanelRun:
    """One window of each domain, on which the ranks are held against one process.

    In float64: in float32 a near-tie in routing or sparse selection can fall either way with the order of a sum, and
    then one token differs by more than any arithmetic error, in ranks and in one process alike.
    """
    first = [panel.domains.index(domain) for domain in dict.fromkeys(panel.domains)]
    few = Panel.of(f"{panel.name}, a window of each domain", [panel.tokens[i] for i in first],
                   [panel.domains[i] for i in first])
    make_reference(store, few, proof / "reference", repeat=False, watch=watch)
    return PanelRun(few, proof / "reference", proof / str(tp), dtype="float64", save_logits=True)


def _agreement(few: Panel, proof: Path, tp: int) -> dict[str, float]:
    """The ranks' logits against one process's; raises RankError if they disagree."""
    found = _compare(few, proof / str(tp), proof / "1")
    if not (found["max_logit_difference"] <= LOGIT_TOLERANCE and found["kl"] <= KL_TOLERANCE):  # NaN is no agreement
        raise RankError(
            f"{tp} ranks and one process disagree: logits by {found['max_logit_difference']:.1e} (at most "
            f"{LOGIT_TOLERANCE:g}), KL {found['kl']:.1e} (at most {KL_TOLERANCE:g}); the checkpoint does not split well"
        )
    return found


def _panel_of(out: Path, reference: Path, config: GlmConfig, recipe: Recipe) -> Panel:
    """A checkpoint's own panel. Its report says no absolute path: a set of a user's own has to be found from here."""
    try:
        return held_out_panel(reference, config, recipe)
    except RecipeError as error:
        raise RecipeError(f"{out} cannot be judged on its recipe's panel '{recipe.panel.set}': {error}. Run this in "
                          "the folder where the job was begun, or where the set lies, or judge it on a text of yours "
                          "with --panel") from None


def refuse_read_panel(recipe: Recipe, folder: Path = Path()) -> None:
    """Refuse (PlanError) a panel on text that calibration reads: what it says of a checkpoint would be too good.

    Two domains read the same text if they have a file in common, but for one's "calibration" and the other's "report"
    part. folder: where the calibration set lies if it is named by a relative path.
    """
    calibration, panel = load_text_set(recipe.calibration.set, folder), load_text_set(recipe.panel.set)
    for read in calibration.only(recipe.calibration.domains).domains:
        for judge in panel.domains:
            common = {file.resolve() for file in read.files} & {file.resolve() for file in judge.files}
            if common and {read.part, judge.part} != {"calibration", "report"}:
                raise PlanError(
                    f"the panel '{recipe.panel.set}' judges on text that calibration reads: {min(common)}, in its "
                    f"domain '{judge.name}' and the calibration's '{read.name}'. Choose other text for one of them, or "
                    'give those domains part = "calibration" and part = "report"'
                )


def held_out_panel(reference: Path, config: GlmConfig, recipe: Recipe) -> Panel:
    """The recipe's panel text, tokenized by the checkpoint's own tokenizer; raises PlanError if it is too short."""
    text = load_text_set(recipe.panel.set)
    end = config.eos_token_ids[0] if config.eos_token_ids else 0
    maker = WindowMaker(reference / "tokenizer.json", end, recipe.panel.window, recipe.seed)
    key = (maker.tokenizer_sha256, text.digest, end, recipe.panel, recipe.seed)
    if key not in _PANELS:
        windows = maker.make(text, shares(text, recipe.panel.windows), None)
        domains = [windows.domains[d] for d in windows.domain.tolist()]
        _PANELS.clear()
        _PANELS[key] = Panel.of(recipe.panel.set, windows.tokens, domains)
    return _PANELS[key]


def _compare(panel: Panel, ranks: Path, single: Path) -> dict[str, float]:
    """Largest logit difference and mean KL between the ranks' logits and one process's."""
    worst, kl, tokens = 0.0, 0.0, 0
    for window in range(len(panel.tokens)):
        name = Path("logits") / f"window-{window:05d}.safetensors"
        for a, b in zip(*(_logits(root / name) for root in (single, ranks)), strict=True):
            worst = max(worst, float((a - b).abs().max()))
            p, q = a.log_softmax(-1), b.log_softmax(-1)
            kl += float((p.exp() * (p - q)).sum())
            tokens += len(a)
    return {"max_logit_difference": worst, "kl": kl / tokens}


def _logits(path: Path) -> Iterator[Tensor]:
    """A window's saved logits, some rows at a time: all of them take 2.5 GB with GLM-5.3's vocabulary."""
    saved = ShardedSource(path.parent, {}, (read_header(path),))
    rows = saved.tensors["logits"].entry.shape[0]
    for start in range(0, rows, LOGIT_ROWS):
        yield saved.read_slice("logits", 0, start, min(start + LOGIT_ROWS, rows)).double()
