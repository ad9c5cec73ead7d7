import json
from collections import Counter
from pathlib import Path

import pytest

from keys35.bench.standin import GLM_5_3
from keys35.errors import PlanError, SourceError
from keys35.glm.config import GlmConfig
from keys35.glm.names import (
    Role,
    Split,
    census,
    check_tp,
    exl3_parts,
    match_source,
    shard_of,
    split_axis,
    total_bytes,
    total_params,
    unit_count,
)

DEMO = Path(__file__).parents[2] / "keys35/demo/model"

def demo_dict() -> dict:
    return json.loads((DEMO / "config.json").read_text())


def as_found(config: GlmConfig) -> dict:
    return {rule.source: (rule.dtypes[0], rule.shape) for rule in census(config).values()}


def test_glm53_census_is_exact():
    config = GlmConfig.from_dict(GLM_5_3)
    rules = census(config)
    assert len(rules) == 59_585
    assert total_params(rules) == 753_329_940_480
    assert total_bytes(rules) == 1_506_659_919_872
    assert sum(rule.layer == 78 for rule in rules.values()) == 791
    routed = sum(r.numel for r in rules.values() if r.role in (Role.EXPERT, Role.MTP_EXPERT))
    assert routed == 734_439_407_616
    assert Counter(r.role for r in rules.values())[Role.EXPERT] == 75 * 256 * 3
    assert rules["model.layers.5.self_attn.kv_a_proj_with_mqa.weight"].padded == (6144, 640)


def test_glm53_has_81_shards_in_canonical_order():
    config = GlmConfig.from_dict(GLM_5_3)
    shards = [shard_of(rule, config) for rule in census(config).values()]
    assert unit_count(config) == 81 and set(shards) == set(range(81)) and shards == sorted(shards)
    assert shards.count(0) == 1 and shards.count(80) == 2 and shards.count(79) == 791


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_fewer_shards_are_contiguous_and_none_is_empty(count):
    config = GlmConfig.from_dict(demo_dict())
    shards = [shard_of(rule, config, count) for rule in census(config).values()]
    assert shards == sorted(shards) and set(shards) == set(range(count))


def test_too_many_shards_are_refused():
    config = GlmConfig.from_dict(demo_dict())
    with pytest.raises(PlanError, match="1 to 7"):
        shard_of(census(config)["lm_head.weight"], config, 8)


def test_demo_census_equals_its_index():
    config = GlmConfig.from_dict(demo_dict())
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    assert set(census(config)) == set(index["weight_map"])
    assert total_bytes(census(config)) == index["metadata"]["total_size"]


def test_split_kinds_follow_the_reader():
    rules = census(GlmConfig.from_dict(GLM_5_3))
    kinds = {
        "self_attn.q_a_proj": Split.REPLICATE, "self_attn.q_b_proj": Split.OUT, "self_attn.o_proj": Split.IN,
        "self_attn.kv_b_proj": Split.ROW, "self_attn.kv_a_proj_with_mqa": Split.REPLICATE,
        "self_attn.indexer.wq_b": Split.REPLICATE, "mlp.gate": Split.REPLICATE,
        "mlp.experts.255.gate_proj": Split.OUT, "mlp.experts.0.down_proj": Split.IN,
        "mlp.shared_experts.up_proj": Split.OUT, "mlp.shared_experts.down_proj": Split.IN,
        "eh_proj": Split.REPLICATE,
    }  # fmt: skip
    for module, split in kinds.items():
        assert rules[f"model.layers.78.{module}.weight"].split is split
    gate, down = (rules[f"model.layers.3.mlp.experts.0.{p}_proj.weight"] for p in ("gate", "down"))
    assert [split_axis(gate, p) for p in ("trellis", "suh", "svh", "mul1")] == [1, None, 0, None]
    assert [split_axis(down, p) for p in ("trellis", "suh", "svh", "mul1")] == [0, 0, None, None]
    assert split_axis(rules["lm_head.weight"]) == 0 and split_axis(rules["model.norm.weight"]) is None
    assert exl3_parts(gate.module)["svh"] == "model.layers.3.mlp.experts.0.gate_proj.svh"


def test_mtp_linears_are_dense_and_its_glue_is_carried():
    rules = census(GlmConfig.from_dict(demo_dict()))
    assert rules["model.layers.4.mlp.experts.7.up_proj.weight"].role is Role.MTP_EXPERT
    assert rules["model.layers.4.self_attn.o_proj.weight"].role is Role.DENSE
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "mlp.gate", "self_attn.kv_b_proj"):
        assert rules[f"model.layers.4.{name}.weight"].role is Role.CARRIED


@pytest.mark.parametrize(
    "extra, words",
    [
        ("model.layers.4.embed_tokens.weight", "own embedding"),
        ("model.layers.4.shared_head.head.weight", "own embedding and head"),
        ("model.layers.1.self_attn.q_a_proj.bias", "no rule"),
        ("model.layers.1.self_attn.q_a_proj.weight_scale_inv", "BF16 checkpoint"),
        ("model.layers.5.input_layernorm.weight", "no rule"),
    ],
)
def test_names_without_a_rule_are_refused(extra, words):
    config = GlmConfig.from_dict(demo_dict())
    with pytest.raises(SourceError, match=words):
        match_source(config, as_found(config) | {extra: ("BF16", (128,))})


def test_indexers_of_sharing_layers_are_the_only_ones_left_out():
    config = GlmConfig.from_dict(demo_dict())
    extra = "model.layers.2.self_attn.indexer.wk.weight"
    assert match_source(config, as_found(config)) == ()
    assert match_source(config, as_found(config) | {extra: ("BF16", (64, 128))}) == (extra,)


def test_missing_misshapen_and_mistyped_tensors_are_all_listed():
    config = GlmConfig.from_dict(demo_dict())
    found = as_found(config)
    del found["model.norm.weight"]
    found["lm_head.weight"] = ("BF16", (2048, 64))
    found["model.embed_tokens.weight"] = ("F8_E4M3", (2048, 128))
    with pytest.raises(SourceError) as caught:
        match_source(config, found)
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight", "3 problems"):
        assert name in str(caught.value)


def test_a_tied_head_is_read_from_the_embedding():
    config = GlmConfig.from_dict(demo_dict() | {"tie_word_embeddings": True})
    assert census(config)["lm_head.weight"].source == "model.embed_tokens.weight"
    assert match_source(config, as_found(config)) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "deepseek_v3"}, {"n_group": 8}, {"scoring_func": "softmax"}, {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, {"indexer_types": ["shared"] * 4},
        {"indexer_types": ["full"] * 3}, {"indexer_types": None}, {"hidden_size": "128"},
        {"first_k_dense_replace": 2}, {"kv_lora_rank": 0},
        {"rms_norm_eps": None}, {"num_experts_per_tok": 9}, {"mtp_hidden": "middle"},
        {"n_routed_experts": 10**9}, {"num_nextn_predict_layers": 10**9}, {"n_routed_experts": 10**30},
        {"eos_token_id": {}}, {"eos_token_id": [0, "x"]}, {"eos_token_id": -1}, {"eos_token_id": [2048]},
    ],
)  # fmt: skip
def test_unsupported_configs_are_refused_by_name(change):
    with pytest.raises(SourceError) as caught:
        GlmConfig.from_dict(demo_dict() | change)
    assert any(key in str(caught.value) for key in [*change, "rope_type", "routes"])


def test_mtp_hidden_recipe_wins_over_config_over_default():
    named = demo_dict() | {"mtp_hidden": "pre_norm"}
    assert GlmConfig.from_dict(demo_dict()).mtp_hidden == "post_norm"
    assert GlmConfig.from_dict(named).mtp_hidden == "pre_norm"
    assert GlmConfig.from_dict(named, "post_norm").mtp_hidden == "post_norm"


def test_legal_ranks_of_absurdly_many_heads_are_named_at_once():
    """Each number up to that of the heads was tried, for hours."""
    config = GlmConfig.from_dict(demo_dict() | {"num_attention_heads": 10**9})
    with pytest.raises(PlanError, match="can have 1, 2, 4 ranks"):
        check_tp(config, 3)


def test_tp_must_cut_whole_blocks():
    demo, full = GlmConfig.from_dict(demo_dict()), GlmConfig.from_dict(GLM_5_3)
    for tp in (1, 2, 4):
        check_tp(demo, tp)
        check_tp(full, tp)
    with pytest.raises(PlanError, match="128"):
        check_tp(demo, 8)
    with pytest.raises(PlanError, match="heads"):
        check_tp(demo, 3)
    padded = GlmConfig.from_dict(demo_dict() | {"moe_intermediate_size": 448})  # 512 only with padding
    with pytest.raises(PlanError, match="448 features.* can have 1 ranks"):
        check_tp(padded, 4)
    check_tp(padded, 1)
