"""Ablate: variants of a recipe, each measured, allocated and scored on the same held-out panel.

Variants that encode alike share a work directory: one that only allocates otherwise costs its forward passes. Every
variant resumes, so several processes may work on different ones and a last one writes the table.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import ValidationError

from keys35 import __version__
from keys35.allocation import bit_counts, mean_width, plain_width, random_mix, whole_model
from keys35.errors import RecipeError
from keys35.files.atomic import read_json, write_json
from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.report.machine import machine
from keys35.report.measured import making
from keys35.runtime.panel import Panel
from keys35.runtime.ranks import Ranks
from keys35.runtime.reference import Reference, make_reference
from keys35.runtime.score import score_panel
from keys35.stages.allocate import allocate, width_sets
from keys35.stages.baselines import score_sets
from keys35.stages.budget import within_size
from keys35.stages.candidates import MixStore
from keys35.stages.choice import EXPERTS, Choice, choose, widths_on
from keys35.stages.costs import Measured, read_measured
from keys35.stages.job import Job, open_job, read_source
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.sizes import class_sizes
from keys35.stages.units import expert_units
from keys35.stages.validate import held_out_panel

ALLOCATED_LATER = ("bits", "scope", "fairness", "fallback")  # keys of [experts] that no encoding depends on
SHIPPED = "ablations.toml"
UNSEEN, FOLDER = "unseen", "ablate"


@dataclass(frozen=True)
class Variant:
    """A named change of a recipe; `changes` maps dotted keys to values, `sets` names what is scored (all if empty;
    "experts": widths by experts' costs even where the recipe falls back; "unseen": see `_unseen`)."""

    group: str
    name: str
    changes: dict[str, Any]
    sets: tuple[str, ...]


def load_variants(path: Path | None, only: Sequence[str] = ()) -> list[Variant]:
    """The variants of a TOML file, the shipped one by default; raises RecipeError for a bad entry or unknown name."""
    source = path or Path(str(files("keys35"))) / SHIPPED
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))["variant"]
        found = [_variant(entry) for entry in raw]
        if len({(v.group, v.name) for v in found}) < len(found):
            raise ValueError("two variants of one group have one name, and would share a row")
    except (OSError, ValueError, KeyError, TypeError) as error:  # TOML's and UTF-8's are ValueErrors
        raise RecipeError(f"{source}: not a list of [[variant]] with group, name and set: {error!r}") from None
    unknown = sorted(set(only) - {v.name for v in found} - {v.group for v in found})
    if unknown:
        raise RecipeError(f"{source} has no variant {', '.join(unknown)}: it has {', '.join(v.name for v in found)}")
    return [v for v in found if not only or {v.name, v.group} & set(only)]


def _variant(entry: Any) -> Variant:
    if not isinstance(entry, dict):
        raise TypeError(entry)
    changes, sets = entry.get("set", {}), entry.get("sets", [])
    words = [entry["group"], entry["name"], *(sets if isinstance(sets, list) else [None])]
    if not isinstance(changes, dict) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"{entry}: group and name are texts, set is a table, sets a list of texts")
    return Variant(entry["group"], entry["name"], changes, tuple(sets))


def vary(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with dotted keys changed; raises RecipeError for a key or value that recipes do not have.

    TOML makes tables of dotted keys without quotes: those change the keys they name and no others, too.
    """
    values = recipe.model_dump()
    for key, value in _dotted(changes):
        *sections, leaf = key.split(".")
        part = values
        for section in sections:
            if not isinstance(part.get(section), dict):
                part[section] = {}  # which the recipe refuses by name
            part = part[section]
        part[leaf] = value
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"variant {changes}: {error.errors()[0]['loc']} {error.errors()[0]['msg']}") from None


def _dotted(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in changes.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def ablate(
    source: Path, recipe: Recipe, variants: Iterable[Variant], root: Path, progress: Progress, finished: bool = False
) -> dict[str, Any]:
    """Score every variant under `root` that has no row there yet; returns one JSON value with a row per variant.

    `finished`: only those that have one. Raises what the stages raise.
    """
    rows = []
    opened, config, _ = read_source(source, recipe)
    asked, recipe = recipe, within_size(recipe, opened, config)
    todo = [(variant, within_size(vary(asked, variant.changes), opened, config)) for variant in variants]
    for variant, changed in todo:  # a bad one is refused before the first is measured
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
        panel = held_out_panel(job.source.root, job.config, recipe)  # the base's: a variant's seed picks other windows
        reference = make_reference(job.store, panel, root / "reference")
        return _row(replace(job, recipe=changed), job, variant, (panel, reference), progress)


def _encoding(changed: Recipe, base: Recipe) -> Recipe:
    """The recipe that a variant's work directory belongs to: all that encodes, with the base's allocation.

    Behind a quantized prefix the allocation shapes every encoding, so that it is the variant's own.
    """
    if changed.encoder.prefix == "quantized":
        return changed
    kept = {key: getattr(base.experts, key) for key in ALLOCATED_LATER}
    widths = changed.experts.widths
    if not widths[0] <= base.experts.budget <= widths[-1]:
        kept["bits"] = changed.experts.bits
    return changed.model_copy(update={"experts": changed.experts.model_copy(update=kept)})


def _folder(changed: Recipe, base: Recipe) -> str:
    values = json.dumps(_encoding(changed, base).guarded(), sort_keys=True)
    return f"encode-{_short_digest(values)}"


def _row(
    job: Job, encoding: Job, variant: Variant, judge: tuple[Panel, Reference], progress: Progress
) -> dict[str, Any]:
    """Measure and encode if nobody has, allocate by the variant's own recipe, score, and sum up."""
    measure(encoding, progress)
    allocate(encoding)
    quantize(encoding, progress)
    measured = read_measured(job)
    choice = choose(job, measured)
    sets = _wanted(job, measured, choice, variant)
    scored = _scored(job, sets, judge, progress)
    sizes = {name: tensor.entry.nbytes for name, tensor in job.source.tensors.items()}
    reference = judge[1].facts
    return {
        "group": variant.group, "name": variant.name, "set": variant.changes,
        "recipe_sha256": job.recipe.digest(), "machine": machine(),
        "noise_floor": reference["noise"], "panel_tokens": reference["tokens"],
        "sets": {name: _numbers(metrics) | {"mean": str(mean_width(sets[name])), "counts": bit_counts(sets[name])}
                 for name, metrics in scored.items()},
        "unseen": _unseen(job, measured, judge) if not variant.sets or UNSEEN in variant.sets else {},
        "choice": choice.facts(),
        "proxy_error": _proxy_errors(job),
        "bytes": sum(size.output_bytes for size in class_sizes(job.rules.values(), job.recipe, sizes, 1)),
        "seconds": {k: v for k, v in making(job.work)["seconds"].items() if not k.startswith(("baseline", FOLDER))},
        "measuring_seconds": sum(making(job.work, until="allocated")["seconds"].values()),
    }


def _wanted(job: Job, measured: Measured, choice: Choice, variant: Variant) -> dict[str, list[np.ndarray]]:
    """The sets of widths that a variant scores, by name."""
    experts = job.recipe.experts
    sets = width_sets(job, measured, choice)
    if experts.measure == "encoded" and (EXPERTS in variant.sets or choice.basis != EXPERTS):
        sets[EXPERTS] = widths_on(job, measured, EXPERTS)[0]
    sets["by-energy"] = whole_model(measured.costs_by_energy(), experts.widths, experts.budget)
    asked = variant.sets or tuple(sets)
    return {name: widths for name, widths in sets.items()
            if name in asked or name.rstrip("0123456789").rstrip("-") in asked}


def _scored(
    job: Job, sets: Mapping[str, Sequence[Any]], judge: tuple[Panel, Reference], progress: Progress
) -> dict[str, dict[str, Any]]:
    """Metrics of each set. Receipts are named by the widths: those that several variants share are scored once.

    Behind a quantized prefix the allocation is scored as the checkpoint has it, every other set as it was measured.
    """
    widths = {name: _by_layer(job, chosen) for name, chosen in sets.items()}
    names = {name: _short_digest(f"{chosen} {judge[0].fingerprint}") for name, chosen in widths.items()}
    final = None
    if job.recipe.encoder.prefix == "quantized" and "allocation" in names:
        final = names["allocation"] = f"final-{names['allocation']}"
    scored = score_sets(job, FOLDER, {names[name]: chosen for name, chosen in widths.items()}, *judge, progress, final)
    return {name: scored[key] for name, key in names.items()}


def _unseen(job: Job, measured: Measured, judge: tuple[Panel, Reference]) -> dict[str, dict[str, float]]:
    """KL of perturbations that no layer weight was made from, beside what they predict; nothing else is quantized.

    Each layer alone at its narrowest width, a random mix, and every expert at the widest width.
    """
    widths, sizes = measured.widths, [len(layer) for layer in measured.error]
    sets = {f"layer {layer} alone at {widths[0]}": [np.full(size, widths[0] if here == place else 0)
                                                   for here, size in enumerate(sizes)]
            for place, layer in enumerate(measured.layers)}
    mix = random_mix(sizes, job.recipe.experts.budget, job.recipe.seed)
    sets |= {"a random mix": mix} if {int(w) for row in mix for w in row} <= set(widths) else {}
    sets[f"all at {widths[-1]}"] = [np.full(size, widths[-1]) for size in sizes]
    found = {}
    for name, chosen in sets.items():
        layers = [[plain_width(w) or None for w in row] for row in chosen]
        store = MixStore(job, dict(zip(measured.layers, layers, strict=True)), only_experts=True)
        found[name] = {"predicted": measured.predicted_kl(layers), "kl": score_panel(store, Ranks(), *judge)["kl"]}
    return found


def _by_layer(job: Job, widths: Sequence[Any]) -> dict[int, list[float]]:
    layers = job.config.moe_layers
    return {layer: [plain_width(w) for w in row] for layer, row in zip(layers, widths, strict=True)}


def _slug(variant: Variant) -> str:
    return _short_digest(f"{variant.group}/{variant.name}")


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
