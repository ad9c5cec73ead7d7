"""A header-true stand-in for GLM-5.3: every name, dtype, shape and shard of the real checkpoint, sparse on disk.

The weights cannot be had everywhere; what a plan needs of them is in the headers. `python -m keys35.bench.standin DIR`
writes 282 files of 1.5 TB in all that occupy a few megabytes.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keys35.files.atomic import write_json
from keys35.files.headers import pack_header, tensor_nbytes
from keys35.files.shards import INDEX_NAME, shard_name
from keys35.glm.config import GlmConfig
from keys35.glm.names import TensorRule, census

SHARDS = 282
FULL_INDEXERS = {0, 1, 2, *range(6, 78, 4)}
GLM_5_3: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "vocab_size": 154880,
    "num_hidden_layers": 78, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "indexer_types": ["full" if layer in FULL_INDEXERS else "shared" for layer in range(78)],
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000},
    "rope_interleave": True, "indexer_rope_interleave": True, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 1_048_576, "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820,
}  # fmt: skip
"""GLM-5.3's geometry (design note glm-moe-dsa, section 2)."""


def write_stand_in(root: Path, config: Mapping[str, Any] = GLM_5_3, shards: int = SHARDS) -> int:
    """Write a source whose headers are true and whose weights are holes; returns the bytes of its tensors."""
    root.mkdir(parents=True, exist_ok=True)
    rules = list(census(GlmConfig.from_dict(config)).values())
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_runs(rules, shards), 1):
        name = shard_name(number, shards)
        _write_sparse(root / name, part)
        weight_map |= {rule.name: name for rule in part}
    total = sum(rule.nbytes for rule in rules)
    write_json(root / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(root / "config.json", dict(config))
    return total


def _runs(rules: list[TensorRule], shards: int) -> Iterator[list[TensorRule]]:
    """Consecutive tensors of about equal bytes; a layer's tensors span several shards, as in the real one."""
    total, done, run, number = sum(rule.nbytes for rule in rules), 0, [], 1
    for index, rule in enumerate(rules):
        run.append(rule)
        done += rule.nbytes
        if number < shards and (done * shards >= total * number or len(rules) - index - 1 == shards - number):
            yield run
            run, number = [], number + 1
    yield run


def _write_sparse(path: Path, rules: list[TensorRule]) -> None:
    layout = [(rule.name, rule.dtypes[0], rule.shape) for rule in rules]
    header = pack_header(layout, {"format": "pt"})
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor_nbytes(dtype, shape) for _, dtype, shape in layout))


def main() -> None:
    """Write the stand-in and say how large it looks and is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("directory", type=Path)
    root = parser.parse_args().directory
    total = write_stand_in(root)
    occupied = sum(os.stat(path).st_blocks * 512 for path in root.iterdir())
    print(f"{root}: {total:,} bytes of tensors in {SHARDS} shards, {occupied:,} bytes on disk")


if __name__ == "__main__":
    main()
