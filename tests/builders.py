"""Builders of tiny checkpoints for tests, written with the stock safetensors library, not with ours."""

import hashlib
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from keys35.files.headers import TORCH_DTYPE, read_header
from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, TensorRule, census, exl3_parts
from keys35.recipe import Recipe
from keys35.stages.profile import profile_rules

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


def random_source(root: Path, config: dict[str, Any] | None = None, shards: int = 2) -> Path:
    """Write a BF16 source with random weights for every tensor of the table of names."""
    config = TINY_CONFIG if config is None else config
    generator = torch.Generator().manual_seed(35)
    tensors = {}
    for rule in census(GlmConfig.from_dict(config)).values():
        values = torch.randn(rule.shape, generator=generator) * 0.05
        if rule.source == rule.name:  # a tied head is not stored
            tensors[rule.name] = values.to(TORCH_DTYPE[rule.dtypes[0]])
    return write_checkpoint(root, tensors, shards, config)


def legal_encoding(rule: TensorRule, bits: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """EXL3 tensors of the right form for a linear; the trellis is random, so they decode to noise."""
    k, n = rule.padded
    svh = torch.ones(n, dtype=torch.float16)
    svh[rule.out_features :] = 0
    shape = (k // 16, n // 16, 16 * bits)
    names = exl3_parts(rule.module)
    return {
        names["trellis"]: torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16),
        names["suh"]: torch.full((k,), 0.01, dtype=torch.float16),
        names["svh"]: svh,
        names["mul1"]: torch.tensor(-2082680531, dtype=torch.int32),
    }


def origin_of_report() -> dict[str, Any]:
    """What an assembly report says of where a checkpoint came from."""
    recipe = Recipe(name="made-up")
    return {
        "format": "keys35-v1", "tool": "keys35 0.0", "source_fingerprint": {"config.json": "0" * 64},
        "recipe": recipe.model_dump(mode="json"), "recipe_sha256": recipe.digest(),
        "calibration_text_sha256": "0" * 64, "proxy_errors": [], "warnings": [],
    }  # fmt: skip


class Output:
    """A finished checkpoint held in memory as tensors and JSON, to be spoilt and then written.

    `widths` gives every routed expert's bits by layer; dense linears have 5 bits and MTP experts 8. `profile` as in
    a recipe; the default leaves the key out, as older checkpoints do.
    """

    def __init__(self, source: Path, widths: dict[int, list[int]], shards: int = 3, profile: str = "per-expert"):
        self.source, self.shards, self.widths = source, shards, widths
        self.config = json.loads((source / "config.json").read_text())
        glm = GlmConfig.from_dict(self.config)
        self.rules = profile_rules(census(glm), profile)
        origin: dict[str, torch.Tensor] = {}
        for path in sorted(source.glob("*.safetensors")):
            origin |= load_file(path)
        generator = torch.Generator().manual_seed(1)
        self.tensors: dict[str, torch.Tensor] = {}
        for rule in self.rules.values():
            if rule.quantized:
                self.tensors |= legal_encoding(rule, self.bits(rule), generator)
            else:
                self.tensors[rule.name] = origin[rule.source]
        total = Counter(str(bits) for layer in widths.values() for bits in layer)
        routed = [bits for layer in widths.values() for bits in layer]
        mean = Fraction(sum(routed), len(routed))
        mtp = {str(layer): [8] * glm.n_routed_experts for layer in glm.mtp_layers}
        self.quantization: dict[str, Any] = {
            "quant_method": "exl3", "version": "keys35 0.0", "format": "keys35-v1", "bits": float(mean),
            "head_bits": 16, "codebook": "mul1", "dense_bits": 5, "mtp_bits": 8,
            "calibration": {"rows": 1, "cols": 128},
            "expert_bits": {str(layer): bits for layer, bits in widths.items()} | mtp,
        }  # fmt: skip
        if profile != "per-expert":
            self.quantization |= {"profile": profile, "dense_bits": 16 if profile == "bf16-rest" else 5}
        if profile == "uniform-layer":
            experts = self.quantization["expert_bits"]
            self.quantization["layer_bits"] = {layer: bits[0] for layer, bits in experts.items()}
            leaves = {rule.projection for rule in self.rules.values() if rule.role is Role.DENSE}
            modules = sorted(leaves | {"fused_qkv_a_proj", "gate_up_proj"})
            self.quantization["non_routed_exl3"] = {"codebook": "mul1", "bits": 5, "modules": modules}
        self.report: dict[str, Any] = {
            **origin_of_report(), "dense_bits": self.quantization["dense_bits"], "mtp_bits": 8,
            "routed_mean_bits": float(mean), "routed_mean_bits_exact": str(mean), "dropped": [],
            "widths_total": dict(total),
            "widths_by_layer": {str(layer): dict(Counter(map(str, bits))) for layer, bits in widths.items()},
            "carried_identical": [rule.name for rule in self.rules.values() if not rule.quantized],
        }  # fmt: skip

    def bits(self, rule: TensorRule) -> int:
        if rule.role is Role.EXPERT:
            return self.widths[rule.layer][rule.expert]
        return 8 if rule.role is Role.MTP_EXPERT else 5

    def storage(self) -> dict[str, Any]:
        """tensor_storage as it follows from the tensors."""
        modules: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            module = modules.setdefault(name.rpartition(".")[0], {"stored_tensors": {}})
            facts = {"shape": list(tensor.shape), "n_bytes": tensor.nbytes, "dtype": str(tensor.dtype)}
            module["stored_tensors"][name] = facts
            if name.endswith(".trellis"):
                bits = tensor.shape[-1] // 16
                module |= {"quant_format": "exl3", "bits_per_weight": bits}
                module["mul1_multiplier"] = 2212286765
        return modules

    def write(self, root: Path) -> Path:
        """Write everything, shard sizes and hashes of the report included."""
        config = {**self.config, "tie_word_embeddings": False, "quantization_config": self.quantization}
        write_checkpoint(root, self.tensors, self.shards, config)
        storage = {**self.quantization, "tensor_storage": self.storage()}
        (root / "quantization_config.json").write_text(json.dumps(storage))
        shards = [{"file": path.name, "bytes": path.stat().st_size, "tensors": len(read_header(path).entries),
                   "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
                  for path in sorted(root.glob("*.safetensors"))]  # fmt: skip
        report = json.dumps({**self.report, "shards": shards, "total_bytes": sum(shard["bytes"] for shard in shards)})
        (root / "KEYS35_ASSEMBLY_REPORT.json").write_text(report)
        return root
