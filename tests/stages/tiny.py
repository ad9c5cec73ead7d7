"""GLM-5.3's names and ratios at small widths, random weights: what tests of scale run on, in seconds."""

from pathlib import Path

from builders import random_source

from keys35.bench.standin import GLM_5_3
from keys35.demo import MODEL
from keys35.recipe import Recipe

LAYERS, EXPERTS = 4, 4
TINY = GLM_5_3 | {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 2048,
    "num_hidden_layers": LAYERS, "first_k_dense_replace": 2, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 64,
    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "qk_head_dim": 64, "v_head_dim": 64,
    "index_n_heads": 2, "index_head_dim": 64, "index_topk": 32, "indexer_types": ["full", "full", "full", "shared"],
    "eos_token_id": [0], "pad_token_id": 0,
}  # fmt: skip


def tiny_source(root: Path, shards: int = 14) -> Path:
    """Two dense and two MoE layers and the MTP layer, a layer over several shards, with the demo's tokenizer."""
    random_source(root, TINY, shards)
    (root / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    return root


def tiny_recipe(**changes: object) -> Recipe:
    """One expert per unit, so that there are many; widths 3 and 4, which the CPU encodes fastest."""
    values = {
        "name": "tiny",
        "experts": {"widths": [3, 4], "bits": 3.25, "group": 1},
        "mtp": {"bits": 4},
        "calibration": {"set": "demo", "window": 48, "fit_windows": 6, "selection_windows": 4,
                        "sensitivity_windows": 4},
        "output": {"shards": LAYERS + 3},
        "panel": {"set": "demo-panel", "window": 48, "windows": 4, "random_mixes": 1},
    }
    return Recipe.model_validate(values | changes)
