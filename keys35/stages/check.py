"""Check: hold a finished checkpoint against everything the engines that read it insist on.

Works from headers, the JSON files and the small tensors (markers and scales); with a reference it also proves
that carried tensors and side files are the source's, with `deep` and `sample` it decodes weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from keys35.errors import Keys35Error, SourceError
from keys35.files.atomic import read_json
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig, refuse_encoded
from keys35.glm.names import Role, census
from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.report.facts import QUANT, REPORT
from keys35.stages.check_config import (
    check_config,
    check_quantization,
    check_recipe,
    check_report,
    check_side_files,
    check_source_names,
    width_histogram,
)
from keys35.stages.check_decoded import check_decoded, check_sample
from keys35.stages.check_engines import check_engines
from keys35.stages.check_files import check_folder, check_shards, read_index, read_shards
from keys35.stages.check_tensors import check_carried, check_headers, check_names, check_values, check_widths
from keys35.stages.contract import RULES, Checkpoint, Finding, broken
from keys35.stages.engines import Engine
from keys35.stages.profile import profile_rules

__all__ = ["RULES", "CheckReport", "Engine", "Finding", "check"]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found, and the facts it recomputed from shapes.

    `findings` are refusals of what was asked for, `notes` concern others: an engine's own wishes when the contract
    was asked for, all other rules when one engine was.
    `widths` counts routed experts by bits per weight; `routed_mean` is their exact mean, None if unknown.
    `counts`: shards, tensors, encoded and carried tensors, tensor bytes, rules checked.
    """

    findings: tuple[Finding, ...]
    counts: dict[str, int]
    widths: dict[int, int]
    routed_mean: Fraction | None
    notes: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def engines(self) -> tuple[str, ...]:
        """Everyone whom the findings concern."""
        return tuple(sorted({engine for finding in self.findings for engine in finding.engines}))


def check(
    out: Path,
    reference: Path | None = None,
    deep: bool = False,
    expected: Recipe | None = None,
    engine: Engine = Engine.ALL,
    sample: int = 0,
    progress: Progress | None = None,
) -> CheckReport:
    """Check the checkpoint in `out`; broken rules become findings, one per rule, never exceptions.

    `reference` is the source it was made from, `expected` the recipe. `deep` hashes every shard and decodes every
    weight, `sample` compares that many decoded linears with the reference. `engine` says whose refusals count: the
    contract's by default. Raises SourceError if `out` is no folder, or the reference cannot be opened or is needed.
    """
    out = Path(out)
    if not out.is_dir():
        raise SourceError(f"{out}: is not a folder; give a finished checkpoint")
    if sample and reference is None:
        raise SourceError(f"comparing {sample} linears of {out} needs their source: give --reference")
    source = None if reference is None else _source_of(out, reference)
    point, found = _open(out, source, expected)
    point.deep, point.sample, point.progress = deep, sample, progress or Progress()
    found += chain.from_iterable(_all_rules(point)) if point.glm else ()
    findings = tuple(finding for finding in found if finding.counts_for(engine))
    notes = tuple(finding for finding in found if not finding.counts_for(engine))
    mean = point.mean(rule.name for rule in point.rules.values() if rule.role is Role.EXPERT)
    return CheckReport(findings, _counts(point), dict(sorted(width_histogram(point).items())), mean, notes)


def _source_of(out: Path, reference: Path) -> ShardedSource:
    """The reference; SourceError where it is an EXL3 checkpoint, or FP8 and the source was not, or the other way round.

    A report that is missing or damaged gets its finding elsewhere.
    """
    source = ShardedSource.open(reference, fp8=None)
    refuse_encoded(source.config, reference, source.tensors)
    try:
        made_from_fp8 = bool(read_json(out / REPORT)["recipe"]["source"]["fp8"])
    except (Keys35Error, KeyError, TypeError):
        return source
    if source.fp8 != made_from_fp8:
        found, wanted = ("FP8", "BF16") if source.fp8 else ("BF16", "FP8")
        raise SourceError(f"{reference} holds {found} weights, and {out} was made from {wanted} ones, to which `check` "
                          "holds it byte for byte: give what it was made from; `validate` takes either")
    return source


def _open(
    out: Path, reference: ShardedSource | None, recipe: Recipe | None
) -> tuple[Checkpoint, list[Finding]]:
    """Read what can be read; every part that cannot gets its finding."""
    findings = list(check_folder(out))
    shards, unreadable = read_shards(out)
    weight_map, total, bad_index = read_index(out)
    findings += [*unreadable, *bad_index, *check_shards(shards, weight_map, total)]
    config = _read_part(out / "config.json", "config-file", findings)
    quantization = _read_part(out / QUANT, "quant-file", findings)
    report = _read_part(out / REPORT, "report-file", findings)
    glm = None
    if config:
        try:
            # These two have rules of their own; an output stores its head even if the source ties it.
            tied = reference is not None and bool(reference.config.get("tie_word_embeddings"))
            glm = GlmConfig.from_dict({**config, "quantization_config": None, "tie_word_embeddings": tied})
        except Keys35Error as error:
            findings += broken("config-file", [("config.json", f"is refused: {error}")])
    stored = ShardedSource(out, config, tuple(shards))
    rules = profile_rules(census(glm), quantization.get("profile", "per-expert")) if glm else {}
    point = Checkpoint(out, stored, rules, glm, quantization, report, weight_map, reference, recipe)
    return point, findings


def _read_part(path: Path, rule: str, findings: list[Finding]) -> dict[str, Any]:
    try:
        value = read_json(path, SourceError, "assemble again")
        if isinstance(value, dict) and value:
            return value
        findings += broken(rule, [(path.name, "holds no JSON object")])
    except SourceError as error:
        findings += broken(rule, [(path.name, f"is not: {error}")])
    return {}


def _all_rules(point: Checkpoint) -> Iterator[Iterator[Finding]]:
    """In this order, because headers fill in the widths that later rules compare."""
    yield check_names(point)
    yield check_headers(point)
    yield check_widths(point)
    yield check_values(point)
    yield check_config(point)
    if point.quantization:
        yield check_quantization(point)
    if point.report:
        yield check_report(point)
    yield check_recipe(point)
    yield check_source_names(point)
    yield check_side_files(point)
    yield check_carried(point)
    yield check_engines(point)
    yield check_decoded(point)
    yield check_sample(point)


def _counts(point: Checkpoint) -> dict[str, int]:
    return {
        "shards": len(point.stored.shards),
        "tensors": len(point.stored.tensors),
        "encoded": len(point.widths),
        "carried": sum(not rule.quantized for rule in point.rules.values()),
        "tensor_bytes": point.stored.total_size,
        "rules": len(RULES),
    }
