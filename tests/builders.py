"""Builders of tiny checkpoints for tests, written with the stock safetensors library, not with ours."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 512,
    "num_hidden_layers": 3, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "qk_head_dim": 64, "v_head_dim": 64,
    "index_n_heads": 4, "index_head_dim": 64, "index_topk": 128, "indexer_types": ["full", "full", "shared"],
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": [0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "rope_interleave": True,
}  # fmt: skip
"""A glm_moe_dsa whose every split dimension cuts into four ranks of whole 128 blocks."""

SIDE_FILES = {"tokenizer.json": b'{"model": 1}\n', "generation_config.json": b"{}", "LICENSE": b"be kind\n"}


def some_tensors(layers: int = 3) -> dict[str, torch.Tensor]:
    """A few small tensors of different dtypes and shapes, the same at every call."""
    torch.manual_seed(35)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        tensors[f"layers.{layer}.weight"] = torch.randn(6, 10).to(torch.bfloat16)
        tensors[f"layers.{layer}.bias"] = torch.randn(5)
        tensors[f"layers.{layer}.trellis"] = torch.randint(-99, 99, (2, 3, 4), dtype=torch.int16)
        tensors[f"layers.{layer}.marker"] = torch.tensor(-2082680531, dtype=torch.int32)
    return tensors


def write_checkpoint(
    root: Path,
    tensors: dict[str, torch.Tensor],
    shards: int = 3,
    config: dict[str, Any] | None = None,
    side_files: dict[str, bytes] | None = None,
) -> Path:
    """Write tensors as `shards` equal runs of names, with index, config and side files; returns `root`."""
    root.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        held = {name: tensors[name].contiguous() for name in part}
        save_file(held, root / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_index(root, weight_map, total)
    (root / "config.json").write_text(json.dumps(TINY_CONFIG if config is None else config))
    for name, data in (SIDE_FILES if side_files is None else side_files).items():
        (root / name).write_bytes(data)
    return root


def write_index(root: Path, weight_map: dict[str, Any], total_size: int) -> None:
    """Write `model.safetensors.index.json` with exactly these contents, sensible or not."""
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(root: Path) -> dict[str, Any]:
    return json.loads((root / "model.safetensors.index.json").read_text())


def write_raw_shard(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file with an arbitrary header (JSON value, text or bytes) and length field."""
    text = header if isinstance(header, bytes) else (
        header.encode() if isinstance(header, str) else json.dumps(header).encode())
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little", signed=size < 0) + text + data)
    return path
