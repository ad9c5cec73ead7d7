"""The table of names: role, shape, padding, tensor-parallel split and shard of every tensor of a model.

Facts: design notes glm-moe-dsa 2 (census), reader-contract 1.1 (split kinds) and exl3-format 1.9 (padding).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from keys35.errors import PlanError, SourceError
from keys35.glm.config import GlmConfig

BLOCK = 128  # a Hadamard block: EXL3 dimensions and their slices are whole blocks
MOST_RANKS = 8  # of one machine; products come in as many shares, so more would cost every pass for few
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


class Role(StrEnum):
    """What happens to a tensor: three kinds are encoded, CARRIED ones are copied byte for byte."""

    EXPERT = "expert"
    DENSE = "dense"
    MTP_EXPERT = "mtp_expert"
    CARRIED = "carried"


class Split(StrEnum):
    """How tensor-parallel ranks share a tensor: all of it, output features, input features, or rows."""

    REPLICATE = "replicate"
    OUT = "out"
    IN = "in"
    ROW = "row"


@dataclass(frozen=True)
class TensorRule:
    """Everything the rest of keys35 asks about one tensor.

    `shape` is the source's, (out, in) for linears. `dtypes` lists legal source dtypes, the usual one first.
    `source` is the tensor to read: `name`, except a tied head, which comes from the embedding.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.CARRIED
    split: Split = Split.REPLICATE
    dtypes: tuple[str, ...] = ("BF16",)
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.name)

    @property
    def module(self) -> str:
        """The name without its last part (.weight, .bias, ...): the prefix of EXL3 parts."""
        return self.name.rpartition(".")[0]

    @property
    def quantized(self) -> bool:
        return self.role is not Role.CARRIED

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def padded(self) -> tuple[int, int]:
        """(in, out) as EXL3 stores them: each rounded up to whole blocks of 128."""
        return -(-self.in_features // BLOCK) * BLOCK, -(-self.out_features // BLOCK) * BLOCK

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the source when the tensor has its usual dtype."""
        return self.numel * _BYTES[self.dtypes[0]]


def census(config: GlmConfig) -> dict[str, TensorRule]:
    """Every tensor of the model, in canonical order: embedding, layers, MTP layers, final norm, head.

    GLM-5.3 has 59,585 of them. Experts of a layer are contiguous, so that a reader streams them in one run.
    """
    rules = [TensorRule(EMBEDDING, (config.vocab_size, config.hidden_size))]
    for layer in config.layers:
        rules.extend(_layer_rules(config, layer))
    rules.append(TensorRule(FINAL_NORM, (config.hidden_size,)))
    tied = EMBEDDING if config.tie_word_embeddings else ""
    rules.append(TensorRule(HEAD, (config.vocab_size, config.hidden_size), split=Split.ROW, source=tied))
    return {rule.name: rule for rule in rules}


def _layer_rules(config: GlmConfig, layer: int) -> Iterator[TensorRule]:
    prefix, d = f"model.layers.{layer}", config.hidden_size

    def carried(name: str, *shape: int, split: Split = Split.REPLICATE) -> TensorRule:
        return TensorRule(f"{prefix}.{name}.weight", shape, split=split, layer=layer)

    if config.is_mtp(layer):
        yield carried("enorm", d)
        yield carried("hnorm", d)
        yield carried("eh_proj", d, 2 * d)
    yield carried("input_layernorm", d)
    yield from _attention_rules(config, layer, f"{prefix}.self_attn")
    yield carried("post_attention_layernorm", d)
    if config.is_moe(layer):
        yield from _moe_rules(config, layer, f"{prefix}.mlp")
    else:
        yield from _mlp_rules(f"{prefix}.mlp", Role.DENSE, d, config.intermediate_size, layer)
    if config.is_mtp(layer):
        yield carried("shared_head.norm", d)


def _attention_rules(config: GlmConfig, layer: int, prefix: str) -> Iterator[TensorRule]:
    d, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    kv_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    index_width = config.index_head_dim

    def carried(name: str, *shape: int, split: Split = Split.REPLICATE) -> TensorRule:
        return TensorRule(f"{prefix}.{name}", shape, split=split, layer=layer)

    def dense(name: str, rows: int, columns: int, split: Split = Split.REPLICATE) -> TensorRule:
        leaf = name.rpartition(".")[2]
        shape = (rows, columns)
        return TensorRule(f"{prefix}.{name}.weight", shape, Role.DENSE, split, layer=layer, projection=leaf)

    yield dense("q_a_proj", q_rank, d)
    yield carried("q_a_layernorm.weight", q_rank)
    yield dense("q_b_proj", heads * config.qk_head_dim, q_rank, Split.OUT)
    yield dense("kv_a_proj_with_mqa", kv_rank + rope, d)
    yield carried("kv_a_layernorm.weight", kv_rank)
    yield carried("kv_b_proj.weight", kv_rows, kv_rank, split=Split.ROW)
    yield dense("o_proj", d, heads * config.v_head_dim, Split.IN)
    if config.has_indexer(layer):
        yield dense("indexer.wq_b", config.index_n_heads * index_width, q_rank)
        yield carried("indexer.wk.weight", index_width, d)
        yield carried("indexer.weights_proj.weight", config.index_n_heads, d)
        yield carried("indexer.k_norm.weight", index_width)
        yield carried("indexer.k_norm.bias", index_width)


def _moe_rules(config: GlmConfig, layer: int, prefix: str) -> Iterator[TensorRule]:
    d, f, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    role = Role.MTP_EXPERT if config.is_mtp(layer) else Role.EXPERT
    yield TensorRule(f"{prefix}.gate.weight", (experts, d), layer=layer)
    # In BF16 this bias keeps 8 of its 238 values and most tokens choose other experts: never convert it.
    bias = f"{prefix}.gate.e_score_correction_bias"
    yield TensorRule(bias, (experts,), dtypes=("F32", "BF16"), layer=layer)
    for expert in range(experts):
        yield from _mlp_rules(f"{prefix}.experts.{expert}", role, d, f, layer, expert)
    yield from _mlp_rules(f"{prefix}.shared_experts", Role.DENSE, d, f * config.n_shared_experts, layer)


def _mlp_rules(
    prefix: str, role: Role, d: int, width: int, layer: int, expert: int | None = None
) -> Iterator[TensorRule]:
    for leaf in PROJECTIONS:
        shape, split = ((d, width), Split.IN) if leaf == "down_proj" else ((width, d), Split.OUT)
        yield TensorRule(f"{prefix}.{leaf}.weight", shape, role, split, layer=layer, expert=expert, projection=leaf)


def total_params(rules: Mapping[str, TensorRule]) -> int:
    """Number of parameters of the model."""
    return sum(rule.numel for rule in rules.values())


def total_bytes(rules: Mapping[str, TensorRule]) -> int:
    """Bytes of the source with usual dtypes (BF16, correction bias F32)."""
    return sum(rule.nbytes for rule in rules.values())


def match_source(config: GlmConfig, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[str, ...]:
    """Compare a source's tensors (name -> dtype, shape) with the census; return the names to leave out.

    Only the unused indexer tensors of layers that share a selection may be left out. Raises SourceError
    listing missing tensors, tensors without a rule, and wrong shapes or dtypes.
    """
    rules = census(config)
    wanted = {rule.source: rule for rule in reversed(rules.values())}
    problems = [f"missing: {name}" for name in wanted if name not in found]
    dropped = []
    for name, (dtype, shape) in sorted(found.items()):
        rule = wanted.get(name)
        if rule is None and _unused_indexer(config, name):
            dropped.append(name)
        elif rule is None:
            problems.append(f"no rule for: {name}{_remark(config, name)}")
        elif tuple(shape) != rule.shape:
            problems.append(f"{name} has shape {list(shape)}, the config asks for {list(rule.shape)}")
        elif dtype not in rule.dtypes:
            problems.append(f"{name} is {dtype}, expected {' or '.join(rule.dtypes)}")
    if problems:
        shown = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise SourceError(f"the source does not match its config ({len(problems)} problems):\n  {shown}{more}")
    return tuple(dropped)


def _unused_indexer(config: GlmConfig, name: str) -> bool:
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or len(parts) < 6 or not parts[2].isdigit():
        return False
    layer = int(parts[2])
    return parts[3:5] == ["self_attn", "indexer"] and layer in config.layers and not config.has_indexer(layer)


def _remark(config: GlmConfig, name: str) -> str:
    if name.endswith((".embed_tokens.weight", ".shared_head.head.weight")):
        return " (an MTP layer uses the model's own embedding and head; remove this copy)"
    if name.endswith((".weight_scale_inv", ".scale")):
        return " (scales of a quantized source; start from the BF16 checkpoint)"
    if name == HEAD and config.tie_word_embeddings:
        return " (config.json ties the head to the embedding; set tie_word_embeddings to false or remove it)"
    return ""


def unit_count(config: GlmConfig) -> int:
    """Number of shard units: the embedding, one per layer, and norm + head (81 for GLM-5.3)."""
    return len(config.layers) + 2


def shard_of(rule: TensorRule, config: GlmConfig, shards: int | None = None) -> int:
    """Index of the output shard that holds a tensor: its unit, or contiguous groups of units.

    Raises PlanError when `shards` is less than one or more than the number of units.
    """
    units = unit_count(config)
    if shards is not None and not 1 <= shards <= units:
        raise PlanError(f"{shards} shards asked for; this model can be cut into 1 to {units}")
    if rule.layer is not None:
        unit = 1 + rule.layer
    else:
        unit = 0 if rule.name == EMBEDDING else units - 1
    return unit if shards is None else unit * shards // units


def exl3_parts(module: str) -> dict[str, str]:
    """Part -> tensor name of one encoded linear (exl3-format 1.1)."""
    return {part: f"{module}.{part}" for part in ("trellis", "suh", "svh", "mul1")}


_PART_AXIS = {
    (Split.OUT, "trellis"): 1,
    (Split.OUT, "svh"): 0,
    (Split.IN, "trellis"): 0,
    (Split.IN, "suh"): 0,
}


def split_axis(rule: TensorRule, part: str = "weight") -> int | None:
    """The axis along which ranks cut a stored part ("weight" or an EXL3 part), None when every rank has all.

    Output split: trellis axis 1 and svh; input split: trellis axis 0 and suh; row split: axis 0.
    """
    if part != "weight":
        return _PART_AXIS.get((rule.split, part))
    return {Split.OUT: 0, Split.ROW: 0, Split.IN: 1}.get(rule.split)


def rank_range(size: int, tp: int, rank: int) -> tuple[int, int]:
    """The half-open range of an evenly cut axis that belongs to a rank."""
    return size // tp * rank, size // tp * (rank + 1)


def check_tp(config: GlmConfig, tp: int) -> None:
    """Refuse (PlanError) ranks that cannot cut this model in whole heads and blocks of 128; one alone cuts nothing."""
    cut = {rule.out_features if rule.split is Split.OUT else rule.in_features: rule.name
           for rule in census(config).values() if rule.split in (Split.OUT, Split.IN)}

    def fault(ranks: int) -> str | None:
        heads, vocab = config.num_attention_heads, config.vocab_size
        if ranks < 1 or heads % ranks or vocab % ranks:
            return f"tp = {ranks} does not divide {heads} attention heads and {vocab} vocabulary rows"
        odd = [size for size in cut if ranks > 1 and size % (ranks * BLOCK)]
        return f"tp = {ranks} cuts {cut[odd[0]]} ({odd[0]} features) off a multiple of {BLOCK}" if odd else None

    if found := fault(tp):
        most = max(1, min(config.num_attention_heads, *(size // BLOCK for size in cut)))  # a block for each
        legal = ", ".join(str(ranks) for ranks in range(1, most + 1) if not fault(ranks))
        raise PlanError(f"{found}; this model can have {legal} ranks")


def most_ranks(config: GlmConfig) -> int:
    """The largest power of two, up to MOST_RANKS, of ranks that this model can have."""
    ranks = 1
    try:
        while 2 * ranks <= MOST_RANKS:
            check_tp(config, 2 * ranks)
            ranks *= 2
    except PlanError:
        pass
    return ranks
