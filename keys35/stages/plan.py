"""Plan: headers only. What the job covers, weighs, needs and takes, before hours are spent."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from keys35.errors import Keys35Error
from keys35.exl3.viterbi import get_backend, prepare
from keys35.files.atomic import free_bytes, read_json
from keys35.files.ledger import MANIFEST
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import TensorRule, census, check_tp, shard_of
from keys35.recipe import Recipe, resource_dir
from keys35.stages.budget import Trade, trades, within_size
from keys35.stages.choice import foregone
from keys35.stages.feasible import refuse_impossible, refuse_uncut, refuse_unfinishable
from keys35.stages.job import Keep, read_source
from keys35.stages.needs import device_bytes, host_bytes, largest_rows, work_parts
from keys35.stages.profile import ProfileCost, profile_costs, profile_rules
from keys35.stages.projection import Projection, encoder_passes, projected, simulated_hours
from keys35.stages.sizes import ClassSize, class_sizes
from keys35.stages.validate import held_out_panel, refuse_read_panel

PROBE_TILES = 256
RATES = "encoder-h200.json"
SHARDS = "model-*.safetensors"


@dataclass(frozen=True)
class MeasuredRate:
    """A GPU's rate from weights and Hessians to packed tensors, as a benchmark file records it."""

    device: str
    weights_per_second: float
    file: str
    date: str


@dataclass(frozen=True)
class Plan:
    """The job in numbers; bytes unless a name says otherwise."""

    source: str
    recipe: str
    tensors: int
    dropped: tuple[str, ...]
    classes: tuple[ClassSize, ...]
    profile: str
    profiles: tuple[ProfileCost, ...]
    mean_bits: float
    trades: tuple[Trade, ...]
    shards: int
    shard_bytes: tuple[int, ...]
    tp: int
    work_parts: dict[str, int]
    free_bytes: int
    held_bytes: int
    """What an earlier run has left of the work directory and the output, which needs no room any more."""
    host_bytes: int
    device_bytes: int
    rows_bytes: int
    """Of the layer whose experts are encoded; a GPU with more than needs.BESIDE_ROWS keeps them beside the rest."""
    weights_to_encode: int
    backend: str
    weights_per_second: float
    missing: tuple[str, ...]
    foregone: str | None
    """Why the widths will be a random mix, None where that is for the measurement to say."""
    measured: MeasuredRate | None
    projection: Projection | None
    """The measured layer extrapolated to this model, None without a measurement."""
    simulated_hours: float | None
    """The same for predicted costs, None where they are predicted anyway."""

    @property
    def work_bytes(self) -> int:
        return sum(self.work_parts.values())

    @property
    def unified_bytes(self) -> int:
        """What host and device take together where they share one memory; what is read leaves the page cache."""
        return self.host_bytes + self.device_bytes + self.rows_bytes

    @property
    def gpu_hours(self) -> float | None:
        """Encoding at the measured rate, None without a measurement."""
        return self.weights_to_encode / self.measured.weights_per_second / 3600 if self.measured else None

    @property
    def source_bytes(self) -> int:
        return sum(c.source_bytes for c in self.classes)

    @property
    def output_bytes(self) -> int:
        return sum(c.output_bytes for c in self.classes)

    @property
    def rank_bytes(self) -> int:
        return sum(c.rank_bytes for c in self.classes)

    @property
    def encode_seconds(self) -> float:
        return self.weights_to_encode / self.weights_per_second


def plan(
    source: Path, recipe: Recipe, work: Path | None = None, tp: int = 4, keep: Keep = "all", out: Path | None = None
) -> Plan:
    """Check a source and predict the job, or what is left of one in `work` and `out`; reads headers, never weights.

    Raises SourceError (files, index, names, shapes), PlanError (cuts, shards) and BudgetError early.
    """
    opened, config, dropped = read_source(source, recipe)
    recipe = within_size(recipe, opened, config)
    table = census(config)
    rules = list(profile_rules(table, recipe.output.profile).values())
    refuse_impossible(rules, config, recipe)
    check_tp(config, tp)
    nbytes = {name: t.entry.nbytes for name, t in opened.tensors.items()}
    shards: list[list[TensorRule]] = [[] for _ in range(recipe.output.shards)]
    for rule in rules:
        shards[shard_of(rule, config, recipe.output.shards)].append(rule)
    shard_bytes = [sum(c.output_bytes for c in class_sizes(shard, recipe, nbytes, tp)) for shard in shards]
    backend, rate = _encoder_rate(recipe)
    parts = work_parts(rules, config, recipe, keep)
    return Plan(
        source=str(source),
        recipe=recipe.name,
        tensors=len(opened.tensors),
        dropped=dropped,
        classes=tuple(class_sizes(rules, recipe, nbytes, tp)),
        profile=recipe.output.profile,
        profiles=profile_costs(table, config, recipe, nbytes, tp),
        mean_bits=float(recipe.experts.budget),
        trades=trades(rules, recipe, nbytes),
        shards=recipe.output.shards,
        shard_bytes=tuple(shard_bytes),
        tp=tp,
        work_parts=parts,
        free_bytes=free_bytes(work or Path.cwd()),
        held_bytes=min(_held(work, MANIFEST), sum(parts.values())) + min(_held(out, SHARDS), sum(shard_bytes)),
        host_bytes=host_bytes(max(nbytes.values()), config, recipe),
        device_bytes=device_bytes(config, recipe),
        rows_bytes=largest_rows(config, recipe),
        weights_to_encode=_weights_to_encode(rules, config, recipe),
        backend=backend,
        weights_per_second=rate,
        missing=tuple(dict.fromkeys(_missing(opened, config, recipe, rules))),
        foregone=_foregone(recipe),
        measured=measured_rate(),
        projection=projected(config, recipe),
        simulated_hours=simulated_hours(config, recipe),
    )


def _held(folder: Path | None, sign: str) -> int:
    """Bytes of all files in a folder that has one of ours; one may vanish meanwhile, another driver being at work."""
    if folder is None or not any(folder.glob(sign)):
        return 0
    found = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += os.lstat(os.path.join(root, name)).st_size
    return found


def _missing(
    source: ShardedSource, config: GlmConfig, recipe: Recipe, rules: Sequence[TensorRule]
) -> Iterator[str]:
    """Refusals that `run` would meet before its first layer: of the source and for want of a tokenizer or of text."""
    asked = (
        lambda: refuse_unfinishable(source),
        lambda: refuse_uncut(rules),
        lambda: refuse_read_panel(recipe),
        lambda: held_out_panel(source.root, config, recipe),
    )
    for ask in asked:
        try:
            ask()
        except Keys35Error as error:
            yield str(error)


def _foregone(recipe: Recipe) -> str | None:
    try:
        return foregone(recipe)
    except Keys35Error:  # of its text, which is among what is missing
        return None


def _weights_to_encode(rules: list[TensorRule], config: GlmConfig, recipe: Recipe) -> int:
    return sum(rule.padded[0] * rule.padded[1] * times for rule, times in encoder_passes(rules, config, recipe))


def measured_rate() -> MeasuredRate | None:
    """The rate over a whole layer that the shipped benchmark found, None where no benchmark is at hand."""
    path = resource_dir("benchmarks", "reports/benchmarks") / RATES
    if not path.is_file():
        return None
    found = read_json(path)
    rate = found["projection"]["layer_mws"] * 1e6
    return MeasuredRate(found["device"], rate, f"reports/benchmarks/{RATES}", found["date"][:10])


def _encoder_rate(recipe: Recipe) -> tuple[str, float]:
    """The backend and its Viterbi rate, measured here and now on a few tiles at the middle width."""
    prepare(recipe.encoder.backend, frozenset({*recipe.experts.widths, recipe.dense.bits, recipe.mtp.bits}))
    backend = get_backend(recipe.encoder.backend)
    bits = recipe.experts.widths[len(recipe.experts.widths) // 2]
    tiles = torch.randn(PROBE_TILES, 256, generator=torch.Generator().manual_seed(0))
    backend.encode_tiles(tiles[:2], bits)  # compiles on first use
    started = time.perf_counter()
    backend.encode_tiles(tiles, bits)
    return backend.name, tiles.numel() / (time.perf_counter() - started)
