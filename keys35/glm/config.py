"""The part of a glm_moe_dsa config.json that decides tensors and arithmetic, refused where unsupported."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from keys35.errors import SourceError

MODEL_TYPE = "glm_moe_dsa"
ENCODED = (".trellis", ".suh", ".svh")
MTP_HIDDEN = ("pre_norm", "post_norm")
MOST_EXPERTS = 1 << 17  # over all layers; GLM-5.3 has 19,456

# key -> the values this architecture code implements (None: the key is absent or null).
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
    "indexer_rope_interleave": (None, True),
    "moe_layer_freq": (None, 1),
    "n_group": (None, 1),
    "norm_topk_prob": (None, True),
    "rope_interleave": (None, True),
    "scoring_func": (None, "sigmoid"),
    "topk_group": (None, 1),
    "topk_method": (None, "noaux_tc"),
}


@dataclass(frozen=True)
class GlmConfig:
    """Geometry and constants of one glm_moe_dsa model, under the names config.json gives them.

    `mlp_layer_types` and `indexer_types` cover the decoder layers only; MTP layers are always sparse with a
    full indexer. `mtp_hidden` says which trunk state feeds the MTP layer: after the final norm or before it.
    `max_position_embeddings`: tokens of the longest text that the model was made for, None if config.json says none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    mtp_hidden: str
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], mtp_hidden: str | None = None) -> "GlmConfig":
        """Read a parsed config.json (or its text_config).

        `mtp_hidden` (from a recipe) wins over the config's own key; without either it is "post_norm", which
        is what GLM-5.3 serving code feeds. Raises SourceError naming the missing or unsupported key.
        """
        config = config.get("text_config") or config
        if not isinstance(config, Mapping):
            raise SourceError(f"config.json has text_config = {config!r}; expected an object")
        _refuse_unsupported(config)
        rope = config.get("rope_parameters") or config
        longest = config.get("max_position_embeddings")
        values = {
            **{name: _positive_int(config, name) for name in _INTEGERS},
            "num_nextn_predict_layers": _positive_int(config, "num_nextn_predict_layers", default=0),
            "indexer_types": _indexer_types(config),
            "mlp_layer_types": _mlp_layer_types(config),
            "routed_scaling_factor": _number(config, "routed_scaling_factor"),
            "rms_norm_eps": _number(config, "rms_norm_eps"),
            "rope_theta": _number(rope, "rope_theta"),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings") or False),
            "mtp_hidden": mtp_hidden or config.get("mtp_hidden") or "post_norm",
            "eos_token_ids": _eos_token_ids(config),
            "max_position_embeddings": longest and _positive_int(config, "max_position_embeddings"),
        }
        if values["mtp_hidden"] not in MTP_HIDDEN:
            raise SourceError(f"mtp_hidden is {values['mtp_hidden']!r}; it must be one of {MTP_HIDDEN}")
        result = cls(**values)
        result._check_geometry()
        return result

    def _check_geometry(self) -> None:
        if self.num_experts_per_tok > self.n_routed_experts:
            raise SourceError(
                f"config.json routes {self.num_experts_per_tok} experts per token but has {self.n_routed_experts}"
            )
        if (all_of_them := self.layers.stop * self.n_routed_experts) > MOST_EXPERTS:
            raise SourceError(  # the table of names has three lines for each, and takes all memory first
                f"config.json has n_routed_experts = {self.n_routed_experts} and num_nextn_predict_layers = "
                f"{self.num_nextn_predict_layers}: {all_of_them} experts, a model may have {MOST_EXPERTS}"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise SourceError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} must be even and at most index_head_dim "
                f"{self.index_head_dim}"
            )

    @property
    def layers(self) -> range:
        """Indices of all layers, the MTP layers last."""
        return range(self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def mtp_layers(self) -> range:
        """Indices of the MTP layers (model.layers.{num_hidden_layers} and on)."""
        return self.layers[self.num_hidden_layers :]

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the decoder layers with routed experts, without the MTP layers."""
        return [layer for layer in range(self.num_hidden_layers) if self.is_moe(layer)]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.num_hidden_layers

    def is_moe(self, layer: int) -> bool:
        return self.is_mtp(layer) or self.mlp_layer_types[layer] == "sparse"

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer computes its own sparse selection instead of reusing an earlier layer's."""
        return self.is_mtp(layer) or self.indexer_types[layer] == "full"


_INTEGERS = [
    field.name for field in fields(GlmConfig) if field.type is int and field.name != "num_nextn_predict_layers"
]


def refuse_other_architectures(root: Path) -> None:
    """Refuse (SourceError) a source of another architecture, or encoded, from config.json alone, in milliseconds.

    A folder without a readable config.json passes: opening it says what is wrong with it.
    """
    path = Path(root) / "config.json"
    if not path.is_file():  # reading a FIFO would wait for ever
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and isinstance(config.get("text_config") or config, dict):
        _refuse_unsupported(config.get("text_config") or config)
        refuse_encoded(config, root)


def refuse_encoded(config: Mapping[str, Any], root: Path, names: Iterable[str] = ()) -> None:
    """Refuse (SourceError) an EXL3 checkpoint in its source's place: scored against itself, it would lose nothing.

    names: its tensors', where its shards were opened; a config.json may have lost its quantization block.
    """
    block = config.get("quantization_config")
    said = "config.json" if isinstance(block, Mapping) and block.get("quant_method") == "exl3" else ""
    if said := said or next((name for name in names if name.endswith(ENCODED)), ""):
        raise SourceError(f"{root} is itself an EXL3 checkpoint, as its {said} tells; give the one it was made from")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("model_type") != MODEL_TYPE:
        raise SourceError(
            f"config.json has model_type {config.get('model_type')!r} (architectures {config.get('architectures')}); "
            f"keys35 supports {MODEL_TYPE} (GlmMoeDsaForCausalLM: GLM-5.2, GLM-5.3 and their kin) only"
        )
    for key, allowed in _SUPPORTED.items():
        if config.get(key) not in allowed:
            raise SourceError(f"config.json has {key} = {config[key]!r}; only {allowed[-1]!r} is implemented")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise SourceError(f"config.json has rope_parameters = {rope!r}; expected an object")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise SourceError(f"config.json has rope_type {rope_type!r}; only 'default' is implemented")


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    minimum = 1 if default is None else default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SourceError(f"config.json has {key} = {value!r}; expected an integer of at least {minimum}")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SourceError(f"config.json has {key} = {value!r}; expected a positive number")
    return float(value)


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The first of them ends every document that is read: any other number would be looked up in the embedding."""
    value, size = config.get("eos_token_id"), _positive_int(config, "vocab_size")
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size for token in found):
        raise SourceError(f"config.json has eos_token_id = {value!r}; expected token ids below vocab_size = {size}")
    return tuple(found)


def _layer_list(config: Mapping[str, Any], key: str, legal: tuple[str, ...]) -> tuple[str, ...]:
    value = config.get(key)
    count = _positive_int(config, "num_hidden_layers")
    if not isinstance(value, list) or len(value) < count or any(kind not in legal for kind in value):
        raise SourceError(f"config.json needs {key}: a list of {count} values out of {legal}")
    return tuple(value[:count])


def _indexer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    # Serving engines have no default for this list, so neither have we.
    types = _layer_list(config, "indexer_types", ("full", "shared"))
    if types[0] != "full":
        raise SourceError("config.json has indexer_types[0] = 'shared'; the first layer has nothing to share")
    return types


def _mlp_layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    count = _positive_int(config, "num_hidden_layers")
    dense = config.get("first_k_dense_replace")
    if dense is None:
        return _layer_list(config, "mlp_layer_types", ("dense", "sparse"))
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense <= count:
        raise SourceError(f"config.json has first_k_dense_replace = {dense!r}; expected 0 to {count}")
    types = ("dense",) * dense + ("sparse",) * (count - dense)
    if config.get("mlp_layer_types") is None:
        return types
    if _layer_list(config, "mlp_layer_types", ("dense", "sparse")) != types:
        raise SourceError(f"config.json's mlp_layer_types disagrees with first_k_dense_replace = {dense}")
    return types
