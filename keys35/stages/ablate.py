"""Ablate: variants of a recipe, each measured, allocated and scored on the same held-out panel.

Variants that encode alike share a work directory: one that only allocates otherwise costs its forward passes. Every
variant resumes, so several processes may work on different ones and a last one writes the table.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import ValidationError

from keys35 import __version__
from keys35.allocation import bit_counts, mean_width, plain_width, whole_model
from keys35.errors import RecipeError
from keys35.files.atomic import read_json, write_json
from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.report.machine import machine
from keys35.report.measured import making
from keys35.runtime.reference import Reference, make_reference
from keys35.stages.allocate import allocate, width_sets
from keys35.stages.baselines import score_sets
from keys35.stages.choice import EXPERTS, choose, widths_on
from keys35.stages.costs import read_measured
from keys35.stages.job import Job, open_job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.sizes import class_sizes
from keys35.stages.units import expert_units
from keys35.stages.validate import held_out_panel

ALLOCATED_LATER = ("bits", "scope", "fairness", "fallback")  # keys of [experts] that no encoding depends on
SHIPPED = "ablations.toml"


@dataclass(frozen=True)
class Variant:
    """A named change of a recipe; `changes` maps dotted keys to values, `sets` names what is scored (all if empty;
    "experts": widths by experts' costs even where the recipe falls back)."""

    group: str
    name: str
    changes: dict[str, Any]
    sets: tuple[str, ...]


def load_variants(path: Path | None, only: Sequence[str] = ()) -> list[Variant]:
    """The variants of a TOML file, the shipped one by default; raises RecipeError for a bad entry or unknown name."""
    source = path or Path(str(files("keys35"))) / SHIPPED
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))["variant"]
        found = [Variant(v["group"], v["name"], v.get("set", {}), tuple(v.get("sets", ()))) for v in raw]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise RecipeError(f"{source}: not a list of [[variant]] with group, name and set: {error!r}") from None
    unknown = sorted(set(only) - {v.name for v in found} - {v.group for v in found})
    if unknown:
        raise RecipeError(f"{source} has no variant {', '.join(unknown)}: it has {', '.join(v.name for v in found)}")
    return [v for v in found if not only or {v.name, v.group} & set(only)]


def vary(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with dotted keys changed; raises RecipeError for a key or value that recipes do not have."""
    values = recipe.model_dump()
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        part = values
        for section in sections:
            part = part.setdefault(section, {})
        part[leaf] = value
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"variant {changes}: {error.errors()[0]['loc']} {error.errors()[0]['msg']}") from None


def ablate(
    source: Path, recipe: Recipe, variants: Iterable[Variant], root: Path, progress: Progress, finished: bool = False
) -> dict[str, Any]:
    """Score every variant under `root` that has no row there yet; returns one JSON value with a row per variant.

    `finished`: only those that have one. Raises what the stages raise.
    """
    rows = []
    for variant in variants:
        changed = vary(recipe, variant.changes)
        path = root / "rows" / f"{_slug(variant)}.json"
        row = read_json(path) if path.exists() else None
        if not finished and (row is None or row["recipe_sha256"] != changed.digest()):
            row = _score(source, recipe, changed, variant, root, progress)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, row)
        rows += [row] if row else []
    return {"tool": f"keys35 {__version__}", "recipe": recipe.model_dump(mode="json"), "variants": rows}


def _score(
    source: Path, recipe: Recipe, changed: Recipe, variant: Variant, root: Path, progress: Progress
) -> dict[str, Any]:
    with open_job(source, _encoding(changed, recipe), root / _folder(changed, recipe)) as job:
        panel = held_out_panel(job.source.root, job.config, job.recipe)
        reference = make_reference(job.store, panel, root / "reference")
        return _row(replace(job, recipe=changed), job, variant, reference, progress)


def _encoding(changed: Recipe, base: Recipe) -> Recipe:
    """The recipe that a variant's work directory belongs to: all that encodes, with the base's allocation."""
    kept = {key: getattr(base.experts, key) for key in ALLOCATED_LATER}
    widths = changed.experts.widths
    if not widths[0] <= base.experts.budget <= widths[-1]:
        kept["bits"] = changed.experts.bits
    return changed.model_copy(update={"experts": changed.experts.model_copy(update=kept)})


def _folder(changed: Recipe, base: Recipe) -> str:
    values = json.dumps(_encoding(changed, base).guarded(), sort_keys=True)
    return f"encode-{hashlib.sha256(values.encode()).hexdigest()[:12]}"


def _row(job: Job, encoding: Job, variant: Variant, reference: Reference, progress: Progress) -> dict[str, Any]:
    """Measure and encode if nobody has, allocate by the variant's own recipe, score, and sum up."""
    measure(encoding, progress)
    allocate(encoding)
    quantize(encoding, progress)
    measured, experts = read_measured(job), job.recipe.experts
    choice = choose(job, measured)
    sets = width_sets(job, measured, choice)
    if EXPERTS in variant.sets:
        sets[EXPERTS] = widths_on(job, measured, EXPERTS)[0]
    sets["by-energy"] = whole_model(measured.predicted_costs(), experts.widths, experts.budget)
    wanted = variant.sets or tuple(sets)
    widths = {name: _by_layer(job, sets[name]) for name in sets if name.rstrip("0123456789").rstrip("-") in wanted
              or name in wanted}
    panel = held_out_panel(job.source.root, job.config, job.recipe)
    scored = score_sets(job, f"ablate/{_slug(variant)}", widths, panel, reference, progress)
    sizes = {name: tensor.entry.nbytes for name, tensor in job.source.tensors.items()}
    return {
        "group": variant.group, "name": variant.name, "set": variant.changes,
        "recipe_sha256": job.recipe.digest(), "machine": machine(),
        "noise_floor": reference.facts["noise"], "panel_tokens": reference.facts["tokens"],
        "sets": {name: _numbers(metrics) | {"mean": str(mean_width(sets[name])), "counts": bit_counts(sets[name])}
                 for name, metrics in scored.items()},
        "choice": choice.facts(),
        "proxy_error": _proxy_errors(job),
        "bytes": sum(size.output_bytes for size in class_sizes(job.rules.values(), job.recipe, sizes, 1)),
        "seconds": {k: v for k, v in making(job.work)["seconds"].items() if not k.startswith("baseline")},
    }


def _by_layer(job: Job, widths: Sequence[Any]) -> dict[int, list[float]]:
    layers = job.config.moe_layers
    return {layer: [plain_width(w) for w in row] for layer, row in zip(layers, widths, strict=True)}


def _slug(variant: Variant) -> str:
    return hashlib.sha256(f"{variant.group}/{variant.name}".encode()).hexdigest()[:12]


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    kept = {key: metrics[key] for key in ("kl", "kl_reverse", "top1", "top2", "ppl", "ppl_reference")}
    kept["domains"] = {name: scored["kl"] for name, scored in metrics["domains"].items()}
    return kept | ({"mtp_acceptance": metrics["mtp"]["acceptance"]} if "mtp" in metrics else {})


def _proxy_errors(job: Job) -> dict[str, float]:
    """Mean proxy error of the routed experts at each candidate width."""
    found: dict[str, list[float]] = {}
    for layer in job.config.moe_layers:
        for unit in expert_units(job, layer):
            receipt = job.work.receipt(unit.name)
            for width, experts in receipt["data"]["proxy_error"].items():
                found.setdefault(width, []).extend(error for expert in experts if expert for error in expert)
    return {width: fmean(errors) for width, errors in found.items()}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown: one table per group of variants; empty without any."""
    if not result["variants"]:
        return ""
    first = result["variants"][0]
    lines = [f"Panel: {first['panel_tokens']:,} tokens; noise floor {first['noise_floor']['kl']:.1e} nats. KL is "
             "BF16 against the variant, mean over positions; `random` are the mixes of the two neighbouring widths, "
             "encoded like the variant, mean and standard deviation over their seeds.", ""]
    for group in dict.fromkeys(row["group"] for row in result["variants"]):
        lines += [f"### {group}", "", "| variant | KL | random mix | gain | worst domain's gain | error only | "
                  "same count per layer | predicted from energy | uniform | top-1 | ppl | proxy error | MB | s |",
                  "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---|---:|---:|"]
        lines += [_line(row) for row in result["variants"] if row["group"] == group] + [""]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    sets = row["sets"]
    ours, mixes = sets["allocation"], [s for name, s in sets.items() if name.startswith("random-")]
    random = [s["kl"] for s in mixes]
    spread = f" +- {stdev(random):.4f}" if len(random) > 1 else ""
    domains = ours["domains"].items() if mixes else ()
    worst = [1 - kl / fmean([s["domains"][name] for s in mixes]) for name, kl in domains]
    uniform = ", ".join(f"{name.removeprefix('uniform-')}: {s['kl']:.4f}" for name, s in sets.items()
                        if name.startswith("uniform-"))
    proxy = ", ".join(f"{width}: {error:.2g}" for width, error in row["proxy_error"].items())
    cells = [
        row["name"], f"{ours['kl']:.4f}", f"{fmean(random):.4f}{spread}" if random else "",
        f"{1 - ours['kl'] / fmean(random):.1%}" if random else "", f"{min(worst):.1%}" if worst else "",
        *(f"{sets[name]['kl']:.4f}" if name in sets else "" for name in ("error-only", "equal-per-layer", "by-energy")),
        uniform,
        f"{ours['top1']:.1%}", f"{ours['ppl']:.3f}", proxy, f"{row['bytes'] / 1e6:.2f}",
        f"{sum(row['seconds'].values()):.0f}",
    ]
    return f"| {' | '.join(cells)} |"
