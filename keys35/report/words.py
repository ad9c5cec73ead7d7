"""Figures as people read them, and the sentences that page and card share."""

from collections.abc import Mapping
from fractions import Fraction
from statistics import fmean
from typing import Any

from keys35.report.facts import RANDOM, Facts

SCALES = ((10**12, 1 << 40, "TB", "TiB"), (10**9, 1 << 30, "GB", "GiB"), (10**6, 1 << 20, "MB", "MiB"),
          (10**3, 1 << 10, "kB", "KiB"))
SET_NAMES = {
    "allocation": "this checkpoint",
    "equal-per-layer": "same bits in every layer",
    "error-only": "by error, layers unweighted",
}


def size(nbytes: int) -> str:
    """276.1 GB (257.1 GiB): both units, because cards that mix them up have misled people."""
    for decimal, binary, name, name_binary in SCALES:
        if nbytes >= decimal:
            return f"{nbytes / decimal:.4g} {name} ({nbytes / binary:.4g} {name_binary})"
    return f"{nbytes:,} B"


def short_size(nbytes: int) -> str:
    """276.1 GB."""
    return size(nbytes).split(" (")[0]


def bits(value: Fraction | float | None) -> str:
    """2.75; exact as a decimal where it is short, "carried" for what is not encoded."""
    return "carried" if value is None else f"{float(value):.6g}"


def nats(value: float) -> str:
    """A KL: four decimals, or an exponent where those would hide it."""
    if value == 0:
        return "0"
    return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"


def share(value: float) -> str:
    """A part of a whole: 86.1%, two decimals near the ends, none at them."""
    if value in (0, 1):
        return f"{value:.0%}"
    return f"{value:.1%}" if 0.0005 < value < 0.9995 else f"{value:.2%}"


def set_name(name: str) -> str:
    """A set of widths as the tables call it."""
    return f"uniform {name.removeprefix('uniform-')} bits" if name.startswith("uniform-") else SET_NAMES.get(name, name)


def noise(quality: Mapping[str, Any]) -> str:
    """What the same model scored against itself, which no smaller difference can beat."""
    floor = quality["noise_floor"]
    return f"KL {nats(floor['kl'])}, {share(floor['changed_top1'])} of top-1 choices changed"


def quality_rows(facts: Facts) -> list[tuple[str, dict[str, float], str]]:
    """(name, metrics, remark) of this checkpoint and its baselines; random mixes as one row with their spread.

    The first row is the quality report's own, from the finished files.
    """
    if facts.quality is None:
        rows = []
    else:
        rows = [(set_name("allocation"), facts.quality["metrics"], "")]
        if facts.behind_prefix and "allocation" in facts.baselines:
            name = "the same widths, like all below without the quantized prefix"
            rows += [(name, facts.baselines["allocation"], "")]
    others = {name: m for name, m in facts.baselines.items() if name != "allocation"}
    mixes = [m for name, m in others.items() if name.startswith(RANDOM)]
    if mixes:
        names = ("kl", "kl_reverse", "kl_p99", "top1", "top2", "ppl", "ppl_reference")
        mean: dict[str, Any] = {name: sum(m[name] for m in mixes) / len(mixes) for name in names}
        if all("mtp" in m for m in mixes):
            mean["mtp"] = {"acceptance": sum(m["mtp"]["acceptance"] for m in mixes) / len(mixes)}
        spread = f"KL {nats(facts.random_kl[0])} to {nats(facts.random_kl[-1])}"
        rows.append((f"random mix, mean of {len(mixes)}", mean, spread))
    return rows + [(set_name(name), m, "") for name, m in others.items() if not name.startswith(RANDOM)]


def verdict(facts: Facts) -> tuple[bool, str] | None:
    """Whether the allocation beats random mixes of the same bytes on held-out text by more than noise; None if unknown.

    A tie is reported as one: an optimiser's output is no gain because it is an optimiser's (exllamav3#108). The widths
    are compared as they were scored beside the mixes: finished files, through the ranks, differ by rounding at least.
    """
    if not facts.random_kl or facts.quality is None or "allocation" not in facts.baselines:
        return None
    ours, floor = facts.baselines["allocation"]["kl"], facts.quality["noise_floor"]["kl"]
    mean, best = fmean(facts.random_kl), facts.random_kl[0]
    figures = f"KL {nats(ours)} against {nats(mean)} (best {nats(best)})"
    if facts.behind_prefix:
        figures += ", all without the quantized prefix"
    elif nats(ours) != nats(facts.quality["metrics"]["kl"]):
        figures += ", all scored by one process"
    if ours + floor < best:
        return True, f"Better than each of {len(facts.random_kl)} random mixes of the same bytes: {figures}, " \
                     f"{1 - ours / mean:.0%} less than their mean."
    if ours + floor < mean:
        return True, f"Better than random mixes of the same bytes on average, not than each: {figures}."
    return False, f"No better than random mixes of the same bytes: {figures}. Do not expect more of it than of those."


def perplexity_note(facts: Facts) -> str:
    """What perplexity is worth, plainly where it fell below the original's."""
    metrics = facts.quality["metrics"] if facts.quality else {}
    if metrics and metrics["ppl"] < metrics["ppl_reference"]:
        return f"Perplexity is for information. At {metrics['ppl']:.3f} it lies below BF16's " \
               f"{metrics['ppl_reference']:.3f}; that is no improvement, KL and top-1 say what was lost."
    return "Perplexity is for information; KL and top-1 say what was lost."


def coverage(facts: Facts) -> dict[str, Any] | None:
    """Calibration rows over all routed experts: count, least (with its place), median, and how many had few or none."""
    layers = (facts.measured or {}).get("layers", {})
    rows = [(count, int(layer), expert) for layer, entry in layers.items() if len(entry["widths"]) > 1
            or not facts.widths or int(layer) in facts.widths for expert, count in enumerate(entry["fit_rows"])]
    if not rows:
        return None
    rows.sort()
    return {
        "experts": len(rows), "least": rows[0], "median": rows[len(rows) // 2][0], "most": rows[-1][0],
        "few": sum(count < 1024 for count, _, _ in rows), "none": sum(count == 0 for count, _, _ in rows),
    }


def few_rows(found: dict[str, Any]) -> str:
    """How many experts are thinly covered, in words."""
    if not found["few"]:
        return "Every expert saw at least 1,024."
    unseen = f", {found['none']:,} of them none" if found["none"] else ""
    return f"{found['few']:,} of {found['experts']:,} saw fewer than 1,024{unseen}."
