"""The rows of an ablation as Markdown: one table per group of variants, and what each did in every domain."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from keys35.stages.ablation_facts import AS_MEASURED

HEAD = ("variant", "KL", "random mix", "gain", "worst domain's gain", "error only", "same count per layer",
        "predicted from energy", "uniform", "top-1", "ppl", "proxy error", "halves' rank correlation", "MB", "s")
OTHERS = ("error-only", "equal-per-layer", "experts")


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown; variants without a row are named, and those that the recipe cannot have."""
    rows, missing = result["variants"], "; ".join(result.get("missing", ()))
    without = [line for why in result.get("left_out", ()) for line in (f"Left out: {why}.", "")]
    without += [f"No row yet of: {missing}.", ""] if missing else []
    if not rows:
        return "\n".join(without)
    lines = [f"Panel: {rows[0]['panel_tokens']:,} tokens; noise floor {rows[0]['noise_floor']['kl']:.1e} nats. KL is "
             "BF16 against the variant, mean over positions; `random mix` are mixes of the two neighbouring "
             "widths, as many as panel.random_mixes, encoded like the variant, mean and standard deviation. A KL with "
             "`r` is of a random mix that "
             "the tool fell back to. Behind a quantized prefix KL is the checkpoint's, gains are without it on both "
             "sides. Proxy error: mean of the experts' linears, by width.", "", *without]
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group]
        lines += [f"### {group}", "", *_grid(HEAD, map(_line, members)), ""]
        if len(members) > 2 and all(set(row["set"]) <= {"seed"} and _mixes(row) for row in members):
            lines += [_over_seeds(members), ""]
    lines += ["### By domain", "", *_grid(("variant", "domain", "KL", "random mix", "gain", "below each mix",
                                           "error only", "same count per layer", "by experts' costs all the same"),
                                          (line for row in rows for line in _by_domain(row))), ""]
    unseen = [line for row in rows for line in _predictions(row)]
    if unseen:
        lines += ["### Layer weights on perturbations that they were not made from", "",
                  *_grid(("variant", "perturbation", "predicted KL", "KL", "off by"), unseen), ""]
    return "\n".join(lines)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def _mixes(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [scored for name, scored in row["sets"].items() if name.startswith("random-")]


def _like_mixes(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The allocation as the mixes beside it are scored, which gains are to."""
    return row["sets"].get(AS_MEASURED, row["sets"]["allocation"])


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation; nothing for no values."""
    if not values:
        return ""
    return f"{fmean(values):.4f}" + (f" +- {stdev(values):.4f}" if len(values) > 1 else "")


def _line(row: Mapping[str, Any]) -> list[str]:
    sets, mixes = row["sets"], _mixes(row)
    ours, like, random = sets["allocation"], _like_mixes(row), [scored["kl"] for scored in mixes]
    worst = [1 - kl / fmean([s["domains"][name] for s in mixes]) for name, kl in like["domains"].items() if mixes]
    uniform = ", ".join(f"{name.removeprefix('uniform-')}: {scored['kl']:.4f}" for name, scored in sets.items()
                        if name.startswith("uniform-"))
    return [
        row["name"], f"{ours['kl']:.4f}" + (" r" if row["choice"]["basis"] == "random" else ""), spread(random),
        f"{1 - like['kl'] / fmean(random):.1%}" if random else "", f"{min(worst):.1%}" if worst else "",
        *(f"{sets[name]['kl']:.4f}" if name in sets else "" for name in ("error-only", "equal-per-layer", "by-energy")),
        uniform, f"{ours['top1']:.1%}", f"{ours['ppl']:.3f}",
        ", ".join(f"{width}: {error:.2g}" for width, error in row["proxy_error"].items()),
        f"{row['choice']['correlation']:.2f}", f"{row['bytes'] / 1e6:.2f}", f"{sum(row['seconds'].values()):.0f}",
    ]


def _by_domain(row: Mapping[str, Any]) -> Iterable[list[str]]:
    """One line per domain; nothing where no mix was scored."""
    sets, mixes = row["sets"], _mixes(row)
    for domain, kl in _like_mixes(row)["domains"].items() if mixes else ():
        random = [scored["domains"][domain] for scored in mixes]
        others = [f"{sets[name]['domains'][domain]:.4f}" if name in sets else "" for name in OTHERS]
        yield [f"{row['group']}: {row['name']}", domain, f"{kl:.4f}", spread(random), f"{1 - kl / fmean(random):.1%}",
               "yes" if kl < min(random) else "no", *others]


def _over_seeds(rows: Sequence[Mapping[str, Any]]) -> str:
    ours = [_like_mixes(row)["kl"] for row in rows]
    gains = [fmean([scored["kl"] for scored in _mixes(row)]) - kl for row, kl in zip(rows, ours, strict=True)]
    return (f"Over these {len(rows)} seeds: KL {spread(ours)}; gain over the random mixes {spread(gains)}, half of it "
            f"{fmean(gains) / 2:.4f}; KL furthest apart {max(ours) - min(ours):.4f}.")


def _predictions(row: Mapping[str, Any]) -> Iterable[list[str]]:
    for name, found in row.get("unseen", {}).items():
        yield [row["name"], name, f"{found['predicted']:.4f}", f"{found['kl']:.4f}",
               f"{found['predicted'] / found['kl'] - 1:+.0%}"]
