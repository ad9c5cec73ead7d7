"""A source with one MoE layer of GLM-5.3's true shape: weights that are not trivial, text, and a tokenizer for it.

Weights have heavy tails, rows and columns of unequal size and experts of unequal norm; a few channels of the stream are
outliers; the router's bias gives experts very unequal shares of the tokens. All of it is drawn on the GPU by name, so
that the same slice comes out wherever it is made.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keys35.bench.standin import GLM_5_3
from keys35.files.atomic import tensor_bytes, write_bytes, write_json, write_safetensors
from keys35.files.headers import SAFETENSORS_NAME
from keys35.files.shards import INDEX_NAME, shard_name
from keys35.glm.config import GlmConfig
from keys35.glm.names import TensorRule, census

WORDS = 4096
WRITERS = 4
DOMAINS = ("plain", "dense")
DOCUMENT_WORDS = 700
OUTLIERS, OUTLIER_SIZE = 12, 12.0
BIAS_SPREAD = 0.052  # a Gini of about 0.5 among 256 experts whose logits have unit variance
TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """What of GLM-5.3's geometry a slice may change, for rehearsals."""

    experts: int = 256
    hidden: int = 6144
    intermediate: int = 2048
    heads: int = 64

    def config(self) -> dict[str, Any]:
        """The slice's config.json: GLM-5.3's with one layer, its own vocabulary and no MTP layer."""
        return GLM_5_3 | {
            "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0,
            "indexer_types": ["full"], "vocab_size": WORDS, "eos_token_id": [0], "pad_token_id": 0,
            "n_routed_experts": self.experts, "hidden_size": self.hidden, "moe_intermediate_size": self.intermediate,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
        }  # fmt: skip


def write_slice(root: Path, shape: Shape, tokens: int) -> Path:
    """Write source, text set and tokenizer under a folder, for so many tokens of calibration; returns the text set."""
    source = root / "source"
    config = shape.config()
    rules = list(census(GlmConfig.from_dict(config)).values())
    parts = [[r for r in rules if r.expert is None], *_by_expert(rules, 32)]
    names = [shard_name(number, len(parts)) for number in range(1, len(parts) + 1)]

    def write(name: str, part: list[TensorRule]) -> None:
        layout = [(rule.name, rule.dtypes[0], rule.shape) for rule in part]
        write_safetensors(source / name, layout, (tensor_bytes(draw(rule, shape)) for rule in part), {"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as pool:  # each hashes what it writes, which takes longest
        list(pool.map(write, names, parts))
    weight_map = {rule.name: name for name, part in zip(names, parts, strict=True) for rule in part}
    total = sum(rule.nbytes for rule in rules)
    write_json(source / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(source / "config.json", config)
    write_bytes(source / "tokenizer.json", _tokenizer().encode())
    return _write_text(root / "text", tokens)


def _by_expert(rules: list[TensorRule], size: int) -> Iterator[list[TensorRule]]:
    last = max(rule.expert for rule in rules if rule.expert is not None)
    for first in range(0, last + 1, size):
        yield [rule for rule in rules if rule.expert is not None and first <= rule.expert < first + size]


def draw(rule: TensorRule, shape: Shape) -> Tensor:
    """One tensor of the slice, in the dtype and shape of its rule."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = int.from_bytes(hashlib.sha256(rule.name.encode()).digest()[:7], "little")
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    dtype = TORCH[rule.dtypes[0]]
    assert SAFETENSORS_NAME[dtype] == rule.dtypes[0]
    leaf = rule.name.rpartition(".")[0].rpartition(".")[2]
    if rule.name.endswith("e_score_correction_bias"):
        value = BIAS_SPREAD * normal(*rule.shape)
    elif len(rule.shape) == 1:
        value = torch.zeros(rule.shape, device=device) if rule.name.endswith("bias") else 1 + 0.1 * normal(*rule.shape)
    elif leaf == "embed_tokens":
        value = normal(*rule.shape)
        value[:, : OUTLIERS] *= OUTLIER_SIZE
    elif leaf == "gate":
        value = normal(*rule.shape) * rule.shape[1] ** -0.5
        value[:, : OUTLIERS] /= OUTLIER_SIZE  # otherwise a few channels would route everything
    else:
        value = _matrix(rule, normal)
    return value.to(dtype).cpu()


def _matrix(rule: TensorRule, normal: Any) -> Tensor:
    """(out, in): Student's t with five degrees of freedom, rows and columns of unequal size."""
    out, inputs = rule.shape
    spread = sum(normal(out, inputs).square_() for _ in range(5)).div_(5).rsqrt_()
    value = normal(out, inputs).mul_(spread).mul_(torch.exp(0.3 * normal(out, 1))).mul_(torch.exp(0.3 * normal(inputs)))
    size = torch.exp(0.3 * normal(1)) if rule.expert is not None else 1.0
    return value.mul_(0.7 * inputs**-0.5 * size)


def _tokenizer() -> str:
    words = {"<end>": 0} | {f"w{number}": number for number in range(1, WORDS)}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<end>"},
    })  # fmt: skip


def _write_text(folder: Path, tokens: int) -> Path:
    """Documents of Zipf-distributed words, a domain with a steeper law beside a flat one."""
    domains = []
    for index, name in enumerate(DOMAINS):
        law = 1 / np.arange(1, WORDS) ** (0.6 + 0.5 * index)
        drawn = np.random.default_rng(35 + index).choice(WORDS - 1, tokens, p=law / law.sum()) + 1
        lines = [" ".join(f"w{w}" for w in drawn[at : at + DOCUMENT_WORDS]) for at in range(0, tokens, DOCUMENT_WORDS)]
        write_bytes(folder / f"{name}.txt", "\n".join(lines).encode())
        domains.append(f'[[domain]]\nname = "{name}"\nshare = 1\nfiles = ["{name}.txt"]\ndocuments = "line"\n')
    write_bytes(folder / "set.toml", ("version = 1\n\n" + "\n".join(domains)).encode())
    return folder / "set.toml"
