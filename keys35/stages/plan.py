"""Plan: headers only. What the job covers, weighs, needs and takes, before hours are spent."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from keys35.allocation import require_exact
from keys35.calibration.text import load_text_set
from keys35.errors import Keys35Error, PlanError
from keys35.exl3.viterbi import get_backend, prepare
from keys35.files.atomic import free_bytes
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import BLOCK, Role, TensorRule, census, check_tp, shard_of, unit_count
from keys35.recipe import Recipe
from keys35.stages.job import read_source
from keys35.stages.profile import ProfileCost, mixed_units, profile_costs, profile_rules
from keys35.stages.sizes import ClassSize, class_sizes, exl3_bytes
from keys35.stages.validate import held_out_panel

FLOAT = 4
PROBE_TILES = 256


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
    shards: int
    shard_bytes: tuple[int, ...]
    tp: int
    work_bytes: int
    free_bytes: int
    host_bytes: int
    device_bytes: int
    weights_to_encode: int
    backend: str
    weights_per_second: float
    missing: tuple[str, ...]

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


def plan(source: Path, recipe: Recipe, work: Path | None = None, tp: int = 4) -> Plan:
    """Check a source and predict the job; reads headers, never weights.

    Raises SourceError (files, index, names, shapes), PlanError (cuts, shards) and BudgetError early.
    """
    opened, config, dropped = read_source(source, recipe)
    table = census(config)
    rules = list(profile_rules(table, recipe.output.profile).values())
    _check_shapes(rules, config, recipe, tp)
    nbytes = {name: t.entry.nbytes for name, t in opened.tensors.items()}
    shards: list[list[TensorRule]] = [[] for _ in range(recipe.output.shards)]
    for rule in rules:
        shards[shard_of(rule, config, recipe.output.shards)].append(rule)
    shard_bytes = [sum(c.output_bytes for c in class_sizes(shard, recipe, nbytes, tp)) for shard in shards]
    backend, rate = _encoder_rate(recipe)
    return Plan(
        source=str(source),
        recipe=recipe.name,
        tensors=len(opened.tensors),
        dropped=dropped,
        classes=tuple(class_sizes(rules, recipe, nbytes, tp)),
        profile=recipe.output.profile,
        profiles=profile_costs(table, config, recipe, nbytes, tp),
        shards=recipe.output.shards,
        shard_bytes=tuple(shard_bytes),
        tp=tp,
        work_bytes=_work_bytes(rules, config, recipe),
        free_bytes=free_bytes(work or Path.cwd()),
        host_bytes=_host_bytes(opened, config, recipe),
        device_bytes=_device_bytes(config, recipe),
        weights_to_encode=_weights_to_encode(rules, recipe),
        backend=backend,
        weights_per_second=rate,
        missing=tuple(_missing(Path(source), config, recipe)),
    )


def _missing(source: Path, config: GlmConfig, recipe: Recipe) -> Iterator[str]:
    """Refusals that `run` would meet before its first layer: no tokenizer, no or too little text."""
    try:
        load_text_set(recipe.calibration.set)
        held_out_panel(source, config, recipe)
    except Keys35Error as error:
        yield str(error)


def _check_shapes(rules: list[TensorRule], config: GlmConfig, recipe: Recipe, tp: int) -> None:
    """Refuse now what would only fail at hour twenty."""
    if recipe.output.shards > unit_count(config):
        raise PlanError(
            f"{recipe.output.shards} shards asked, this model has {unit_count(config)} units "
            "(embedding, one per layer, norm with head): lower output.shards"
        )
    require_exact(recipe.experts.budget, *mixed_units(config, recipe))
    check_tp(config, tp)
    experts = (r for r in rules if r.role in (Role.EXPERT, Role.MTP_EXPERT))
    odd = [r.name for r in experts if r.shape[0] % BLOCK or r.shape[1] % BLOCK]
    if odd:
        raise PlanError(f"routed experts are not multiples of {BLOCK}, engines cannot cut them: {odd[:3]}")


def _weights_to_encode(rules: list[TensorRule], recipe: Recipe) -> int:
    passes = {Role.EXPERT: len(recipe.experts.widths), Role.MTP_EXPERT: 1, Role.DENSE: 1, Role.CARRIED: 0}
    return sum(r.padded[0] * r.padded[1] * passes[r.role] for r in rules if r.quantized)


def _work_bytes(rules: list[TensorRule], config: GlmConfig, recipe: Recipe) -> int:
    """Candidates of every width, fixed-width tensors, Hessians of fixed-width linears, two states, MoE rows."""
    stored = sum(exl3_bytes(r, sum(recipe.experts.widths)) for r in rules if r.role is Role.EXPERT)
    stored += sum(exl3_bytes(r, recipe.mtp.bits) for r in rules if r.role is Role.MTP_EXPERT)
    stored += sum(exl3_bytes(r, recipe.dense.bits) for r in rules if r.role is Role.DENSE)
    dense = [r for r in rules if r.projection and r.expert is None]  # captured whether or not they are encoded
    inputs = {(r.layer, r.in_features, r.module.rsplit(".", 1)[0]) for r in dense}
    hessians = FLOAT * sum(width * width for _, width, _ in inputs)
    return int(stored) + hessians + 2 * _state_bytes(config, recipe) + 2 * _rows_bytes(config, recipe)


def _tokens(recipe: Recipe) -> int:
    return (recipe.calibration.fit_windows + recipe.calibration.selection_windows) * recipe.calibration.window


def _state_bytes(config: GlmConfig, recipe: Recipe) -> int:
    """Hidden states of all windows (float32) and the sparse selection carried to sharing layers (int32)."""
    return _tokens(recipe) * (config.hidden_size * FLOAT + min(config.index_topk, recipe.calibration.window) * 4)


def _rows_bytes(config: GlmConfig, recipe: Recipe) -> int:
    return _tokens(recipe) * (config.hidden_size * FLOAT + config.num_experts_per_tok * 2 * FLOAT)


def _host_bytes(source: ShardedSource, config: GlmConfig, recipe: Recipe) -> int:
    """The states and rows of one layer, its largest Hessian twice, its largest source tensor twice."""
    largest = max(t.entry.nbytes for t in source.tensors.values())
    width = max(config.num_attention_heads * config.v_head_dim, config.intermediate_size, config.hidden_size)
    return _state_bytes(config, recipe) + _rows_bytes(config, recipe) + 2 * FLOAT * width * width + 2 * largest


def _device_bytes(config: GlmConfig, recipe: Recipe) -> int:
    """One layer in float32 while states advance, or one group of experts while it is encoded; the larger."""
    expert = 3 * config.hidden_size * config.moe_intermediate_size * FLOAT
    hessians = FLOAT * (config.hidden_size**2 + config.moe_intermediate_size**2)
    group = recipe.experts.group * (6 * expert + 3 * hessians)
    return max(config.n_routed_experts * expert, group)


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
