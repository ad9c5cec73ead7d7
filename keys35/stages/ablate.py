"""Ablate: variants of a recipe, each measured, allocated and scored on the same held-out panel.

Variants that encode alike share a work directory: one that only allocates otherwise costs its forward passes. Every
variant resumes, so several processes may work on different ones and a last one writes the table.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keys35 import __version__
from keys35.allocation import bit_counts, mean_width, plain_width, whole_model
from keys35.calibration.text import load_text_set
from keys35.errors import Keys35Error, RecipeError
from keys35.files.atomic import write_json
from keys35.files.forms import read_formed
from keys35.files.ledger import held
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import census
from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.report.machine import machine
from keys35.report.measured import making
from keys35.runtime.panel import Panel
from keys35.runtime.reference import Reference, make_reference
from keys35.stages.ablation_facts import AS_MEASURED, numbers, proxy_errors, unseen
from keys35.stages.allocate import allocate, width_sets
from keys35.stages.baselines import score_sets
from keys35.stages.budget import within_size
from keys35.stages.candidates import are_held
from keys35.stages.choice import EXPERTS, Choice, choose, widths_on
from keys35.stages.costs import Measured, read_measured
from keys35.stages.feasible import refuse_impossible
from keys35.stages.job import Job, open_job, read_source
from keys35.stages.measure import measure
from keys35.stages.profile import profile_rules
from keys35.stages.quantize import quantize
from keys35.stages.sizes import class_sizes
from keys35.stages.validate import held_out_panel
from keys35.stages.variants import ALLOCATION, UNSEEN, Variant, kind

ALLOCATED_LATER = ("bits", "scope", "fairness", "fallback")  # keys of [experts] that no encoding depends on
FOLDER = "ablate"

MADE_BY = {"type": "object", "required": ["group", "name", "recipe_sha256"]}


def ablate(
    source: Path, recipe: Recipe, variants: Iterable[Variant], root: Path, progress: Progress, finished: bool = False
) -> dict[str, Any]:
    """Score every variant under `root` that has no row there yet; returns one JSON value with a row per variant.

    A row of another recipe, source or text is none. `finished`: only those that have one. Raises what the stages raise.
    """
    rows, missing = [], []
    opened, config, _ = read_source(source, recipe)
    asked, recipe = recipe, within_size(recipe, opened, config)
    todo, left_out = _possible(asked, variants, opened, config)  # a bad one is refused before any is measured
    for variant, changed, made_of in todo:
        path = root / "rows" / f"{_slug(variant)}.json"
        row = read_formed(path, MADE_BY) if path.exists() else None
        if row and (row["recipe_sha256"] != changed.digest() or row.get("made_of", made_of) != made_of):
            row = None
        if not finished and row is None:
            row = _score(source, recipe, changed, variant, root, progress) | {"made_of": made_of}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, row)
        rows += [row] if row else []
        missing += [] if row else [variant.name]
    return {"tool": f"keys35 {__version__}", "recipe": recipe.model_dump(mode="json"), "variants": rows,
            "missing": missing, "left_out": left_out}


def _possible(
    base: Recipe, variants: Iterable[Variant], source: ShardedSource, config: GlmConfig
) -> tuple[list[tuple[Variant, Recipe, dict[str, Any]]], list[str]]:
    """Each variant with its recipe and what its row comes from, and why shipped ones are left out.

    Raises by its name what a job of any other would be refused for, or of the first if none is left.
    """
    possible, refused, prints = [], [], _short_digest(json.dumps(source.fingerprint()))
    for variant in variants:
        try:
            changed = _changed(base, variant, source, config)
            possible.append((variant, changed, _made_of(prints, variant, changed)))
        except Keys35Error as error:
            refused.append(type(error)(f"variant '{variant.name}': {error}"))
            if not variant.shipped:
                raise refused[-1] from None
    if refused and not possible:
        raise refused[0]
    return possible, [str(error) for error in refused]


def _changed(base: Recipe, variant: Variant, source: ShardedSource, config: GlmConfig) -> Recipe:
    """A variant's recipe; raises what a job of it would be refused for."""
    varied, mixes = variant.of(base), {"random_mixes": base.panel.random_mixes}
    if varied.panel.model_copy(update=mixes) != base.panel:
        raise RecipeError("all are judged on the recipe's own panel, whose random_mixes alone may differ")
    changed, base = (within_size(recipe, source, config) for recipe in (varied, base))
    for recipe in (changed, encoded_as(changed, base)):
        refuse_impossible(profile_rules(census(config), recipe.output.profile).values(), config, recipe)
    return changed


def _made_of(source: str, variant: Variant, changed: Recipe) -> dict[str, Any]:
    """What a row comes from beside its recipe; raises RecipeError for text that is missing."""
    calibration = load_text_set(changed.calibration.set).only(changed.calibration.domains)
    return {"source": source, "calibration_text": _short_digest(calibration.digest),
            "panel_text": _short_digest(load_text_set(changed.panel.set).digest), "sets": sorted(variant.sets)}


def _score(
    source: Path, recipe: Recipe, changed: Recipe, variant: Variant, root: Path, progress: Progress
) -> dict[str, Any]:
    with open_job(source, encoded_as(changed, recipe), root / work_folder(changed, recipe)) as job:
        panel = held_out_panel(job.source.root, job.config, recipe)  # the base's: a variant's seed picks other windows
        with held(root / "reference", wait=True):  # one that begins to make it removes what another has made of it
            reference = make_reference(job.store, panel, root / "reference")
        return _row(replace(job, recipe=changed), job, variant, (panel, reference), progress)


def encoded_as(changed: Recipe, base: Recipe) -> Recipe:
    """The recipe that a variant's work directory belongs to: all that encodes, with the base's allocation.

    Behind a quantized prefix the allocation shapes every encoding, and with predicted costs it says which there are, so
    that it is the variant's own; so it is for layers of one width, which may not have the base's mean.
    """
    own = changed.experts.measure == "predicted" or changed.output.profile == "uniform-layer"
    if own or changed.encoder.prefix == "quantized":
        return changed
    kept = {key: getattr(base.experts, key) for key in ALLOCATED_LATER}
    widths = changed.experts.widths
    if not widths[0] <= base.experts.budget <= widths[-1]:
        kept["bits"] = changed.experts.bits
    return changed.model_copy(update={"experts": changed.experts.model_copy(update=kept)})


def work_folder(changed: Recipe, base: Recipe) -> str:
    """Name of the work directory that all variants with these encodings share."""
    values = json.dumps(encoded_as(changed, base).guarded(), sort_keys=True)
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
    scored = score_each(job, sets, judge, progress)
    sizes = {name: tensor.entry.nbytes for name, tensor in job.source.tensors.items()}
    weighs = job.recipe.experts.measure == "encoded" and (not variant.sets or UNSEEN in variant.sets)
    reference = judge[1].facts
    return {
        "group": variant.group, "name": variant.name, "set": variant.changes,
        "recipe_sha256": job.recipe.digest(), "machine": machine(),
        "noise_floor": reference["noise"], "panel_tokens": reference["tokens"],
        "sets": {name: numbers(metrics) | {"mean": str(mean_width(sets[name])), "counts": bit_counts(sets[name])}
                 for name, metrics in scored.items()},
        "unseen": unseen(job, measured, judge) if weighs else {},
        "choice": choice.facts(),
        "proxy_error": proxy_errors(job),
        "bytes": sum(size.output_bytes for size in class_sizes(job.rules.values(), job.recipe, sizes, 1)),
        "seconds": {k: v for k, v in making(job.work)["seconds"].items() if not k.startswith(("baseline", FOLDER))},
        "measuring_seconds": sum(making(job.work, until="allocated")["seconds"].values()),
    }


def _wanted(job: Job, measured: Measured, choice: Choice, variant: Variant) -> dict[str, list[np.ndarray]]:
    """The sets of widths that a variant scores, by name; with predicted costs only what happens to be encoded."""
    experts = job.recipe.experts
    sets = width_sets(job, measured, choice)
    if experts.measure == "encoded" and (EXPERTS in variant.sets or choice.basis != EXPERTS):
        sets[EXPERTS] = widths_on(job, measured, EXPERTS)[0]
    sets["by-energy"] = whole_model(measured.costs_by_energy(), experts.widths, experts.budget)
    asked = variant.sets or tuple(sets)
    return {name: widths for name, widths in sets.items() if (name in asked or kind(name) in asked)
            and (name == ALLOCATION or experts.measure == "encoded" or are_held(job, _by_layer(job, widths)))}


def score_each(
    job: Job, sets: Mapping[str, Sequence[Any]], judge: tuple[Panel, Reference], progress: Progress
) -> dict[str, dict[str, Any]]:
    """Metrics of each set. Receipts are named by the widths: those that several variants share are scored once.

    Behind a quantized prefix the allocation is scored as the checkpoint has it, every other set as it was measured; so
    is the allocation once more where others are, since that is what they compare with.
    """
    widths = {name: _by_layer(job, chosen) for name, chosen in sets.items()}
    names = {name: _short_digest(f"{chosen} {judge[0].fingerprint}") for name, chosen in widths.items()}
    final = None
    if job.recipe.encoder.prefix == "quantized" and ALLOCATION in names:
        if job.recipe.experts.measure == "encoded" and len(names) > 1:
            names[AS_MEASURED], widths[AS_MEASURED] = names[ALLOCATION], widths[ALLOCATION]
        final = names[ALLOCATION] = f"final-{names[ALLOCATION]}"
    scored = score_sets(job, FOLDER, {names[name]: chosen for name, chosen in widths.items()}, *judge, progress, final)
    return {name: scored[key] for name, key in names.items()}


def _by_layer(job: Job, widths: Sequence[Any]) -> dict[int, list[float]]:
    layers = job.config.moe_layers
    return {layer: [plain_width(w) for w in row] for layer, row in zip(layers, widths, strict=True)}


def _slug(variant: Variant) -> str:
    return _short_digest(f"{variant.group}/{variant.name}")


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
