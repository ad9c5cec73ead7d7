"""Validate: what a finished checkpoint lost against its BF16 source, as the tensor-parallel runtime sees it."""

from pathlib import Path
from typing import Any

from keys35.calibration.text import load_text_set
from keys35.calibration.windows import WindowMaker, shares
from keys35.errors import ContractError
from keys35.files.atomic import load_tensors, read_json, write_json
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.weights import WeightStore
from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.runtime.launch import PanelResult, run_panel
from keys35.runtime.panel import Panel
from keys35.runtime.reference import make_reference
from keys35.stages.assemble import QUALITY, REPORT

SINGLE_LIMIT_BYTES = 4 << 30
LOGIT_BYTES = 4


def recipe_of(out: Path) -> Recipe:
    """The recipe a finished checkpoint was made by, from its report."""
    report = read_json(out / REPORT, ContractError, "it is no keys35 checkpoint, or its report is damaged")
    return Recipe.model_validate(report["recipe"])


def validate(
    out: Path, reference: Path, recipe: Recipe, tp: int, scratch: Path, progress: Progress
) -> dict[str, Any]:
    """Score `out` on the recipe's held-out panel with `tp` ranks, and hold them against one process.

    The reference's states are kept in `scratch` and reused. Writes KEYS35_QUALITY.json (no times in it) into `out`.
    Raises RankError, SourceError, PlanError.
    """
    source = ShardedSource.open(reference)
    config = GlmConfig.from_dict(source.config, mtp_hidden=recipe.mtp.hidden)
    panel = held_out_panel(reference, config, recipe)
    results: dict[str, PanelResult] = {}
    single = tp > 1 and panel.token_count * config.vocab_size * LOGIT_BYTES <= SINGLE_LIMIT_BYTES
    for step in progress.walk("validate", ["reference", f"tp-{tp}", *(["one-process"] if single else [])]):
        if step.unit == "reference":
            make_reference(WeightStore(source, config), panel, scratch / "reference")
        else:
            ranks = tp if step.unit == f"tp-{tp}" else 1
            results[step.unit] = run_panel(
                out, panel, scratch / "reference", ranks, scratch / step.unit,
                mtp_hidden=recipe.mtp.hidden, save_logits=single,
            )
    scored = results[f"tp-{tp}"]
    quality = {
        "panel": {
            "set": recipe.panel.set,
            "sha256": panel.fingerprint,
            "windows": len(panel.tokens),
            "tokens": panel.token_count,
        },
        "noise_floor": read_json(scratch / "reference" / "reference.json")["noise"],
        "metrics": scored.metrics,
        "tp": tp,
        "ranks": [{"rank": r["rank"], "bytes_read": r["bytes_read"], **r["bytes_by_class"]} for r in scored.ranks],
        "checkpoint_bytes": ShardedSource.open(out).total_size,
        "tp_against_one": _compare(panel, scratch / f"tp-{tp}", scratch / "one-process") if single else None,
    }
    write_json(out / QUALITY, quality)
    timing = {"seconds": scored.seconds, "peak_rss_bytes": [r["peak_rss_bytes"] for r in scored.ranks]}
    return quality | {"timing": timing}


def held_out_panel(reference: Path, config: GlmConfig, recipe: Recipe) -> Panel:
    """The recipe's panel text, tokenized by the checkpoint's own tokenizer; raises PlanError if it is too short."""
    text = load_text_set(recipe.panel.set)
    end = config.eos_token_ids[0] if config.eos_token_ids else 0
    maker = WindowMaker(reference / "tokenizer.json", end, recipe.panel.window, recipe.seed)
    windows = maker.make(text, shares(text, recipe.panel.windows), None)
    return Panel.of(recipe.panel.set, windows.tokens, [windows.domains[d] for d in windows.domain.tolist()])


def _compare(panel: Panel, ranks: Path, single: Path) -> dict[str, float]:
    """Largest logit difference and mean KL between the ranks' logits and one process's."""
    worst, kl, tokens = 0.0, 0.0, 0
    for window in range(len(panel.tokens)):
        name = Path("logits") / f"window-{window:05d}.safetensors"
        a, b = (load_tensors(root / name)["logits"].double() for root in (single, ranks))
        worst = max(worst, float((a - b).abs().max()))
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        tokens += len(a)
    return {"max_logit_difference": worst, "kl": kl / tokens}
