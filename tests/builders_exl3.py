"""Small glm_moe_dsa checkpoints of any size, plain or in EXL3, and windows of the bundled text."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from builders import write_checkpoint
from tokenizers import Tokenizer
from torch import Tensor

from keys35.exl3.codebook import codebook_table, marker_tensor
from keys35.exl3.hadamard import rotate_in, rotate_out
from keys35.exl3.tiles import pack, to_ring
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, TensorRule, census

DEMO = Path(__file__).parents[1] / "keys35/demo"


def demo_config() -> GlmConfig:
    return GlmConfig.from_dict(json.loads((DEMO / "model/config.json").read_text()), "pre_norm")


def demo_windows(file: str, count: int, length: int) -> list[Tensor]:
    """`count` windows of `length` tokens, spread evenly over a bundled text."""
    text = (DEMO / "text" / file).read_text()
    ids = Tokenizer.from_file(str(DEMO / "model/tokenizer.json")).encode(text, add_special_tokens=False).ids
    step = len(ids) // count
    return [torch.tensor(ids[start : start + length]) for start in range(0, step * count, step)]


def config_json(config: GlmConfig) -> dict:
    """A config.json that reads back as `config`."""
    values = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()
    }
    return values | {"model_type": "glm_moe_dsa", "eos_token_id": values.pop("eos_token_ids")}


def random_source(root: Path, config: GlmConfig, seed: int = 0) -> ShardedSource:
    """A plain BF16 checkpoint of random weights for any configuration."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {rule.name: _random(rule, generator) for rule in census(config).values()}
    return ShardedSource.open(write_checkpoint(root, tensors, shards=2, config=config_json(config)))


def _random(rule: TensorRule, generator: torch.Generator) -> Tensor:
    values = torch.randn(rule.shape, generator=generator) * 0.05
    if len(rule.shape) == 1 and "norm" in rule.name and rule.name.endswith(".weight"):
        values = values + 1
    return values if "F32" in rule.dtypes else values.bfloat16()


def random_exl3(
    shape: tuple[int, int], bits: float, generator: torch.Generator, scale: float
) -> dict[str, Tensor]:
    """Legal parts of an EXL3 linear with `shape` (in, out), decoding to noise of about `scale` rms."""
    k, n = shape
    words = torch.randint(
        -32768, 32768, (k // 16, n // 16, int(16 * bits)), generator=generator, dtype=torch.int16
    )
    suh, svh = (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0 for size in shape)
    return {"trellis": words, "suh": (suh * scale).half(), "svh": svh.half(), "mul1": marker_tensor("mul1")}


def rounded_exl3(weight: Tensor) -> dict[str, Tensor]:
    """An 8-bit EXL3 linear close to `weight` (in, out), found greedily: no Hessian, no Viterbi, but fast."""
    signs = [torch.randn(size, generator=torch.Generator().manual_seed(size)).sign() for size in weight.shape]
    svh = (weight.square().mean(0).sqrt() * signs[1]).half().float()
    even = torch.where(svh == 0, 0, weight / svh)
    suh = (even.square().mean(1).sqrt() * signs[0] * 1.3).half().float()  # 1.3: tails fit the codebook
    target = to_ring(rotate_out(rotate_in(torch.where(suh == 0, 0, even.T / suh).T))).reshape(-1, 256)
    table = codebook_table("mul1").view(256, 256)  # row: the previous position's byte, column: this one's
    values, order = table.sort(1)
    apart = torch.arange(256)[:, None] * 100.0  # keeps the rows of one long sorted list separate
    symbols = torch.zeros(target.shape, dtype=torch.long)
    for position in range(1, 256):
        before = symbols[:, position - 1]
        key = target[:, position] + before * 100.0
        right = torch.searchsorted((values + apart).flatten(), key).clamp(max=65535) - before * 256
        near = torch.stack([right - 1, right], 1).clamp(0, 255)
        best = (values[before[:, None], near] - target[:, position, None]).abs().argmin(1, keepdim=True)
        symbols[:, position] = order[before[:, None], near.gather(1, best)][:, 0]
    # The ring closes at position 0, whose byte must suit itself and, as the previous byte, position 1.
    miss = (table[symbols[:, -1]] - target[:, :1]) ** 2
    miss += (table[:, symbols[:, 1]].T - target[:, 1:2]) ** 2
    symbols[:, 0] = miss.argmin(1)
    states = symbols.roll(1, 1) * 256 + symbols
    k, n = weight.shape
    trellis = pack(states.view(k // 16, n // 16, 256), 8)
    return {"trellis": trellis, "suh": suh.half(), "svh": svh.half(), "mul1": marker_tensor("mul1")}


def rounded_checkpoint(root: Path, source: ShardedSource, config: GlmConfig) -> ShardedSource:
    """`source` with every linear as an 8-bit EXL3 one: a little worse than the source, not noise."""

    def encode(rule: TensorRule) -> dict[str, Tensor]:
        weight = torch.zeros(rule.padded)
        weight[: rule.in_features, : rule.out_features] = source.read(rule.name).T.float()
        return rounded_exl3(weight)

    return exl3_checkpoint(root, source, config, encode)


def exl3_checkpoint(
    root: Path,
    source: ShardedSource,
    config: GlmConfig,
    encode: Callable[[TensorRule], dict[str, Tensor]] | None = None,
    seed: int = 1,
) -> ShardedSource:
    """A full EXL3 checkpoint: carried tensors copied from `source`, linears encoded or random trellises.

    Random ones have 2 to 4 bits for experts, 5 elsewhere, 8 for MTP experts.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(rule: TensorRule) -> dict[str, Tensor]:
        bits = {Role.EXPERT: 2 + (rule.expert or 0) % 3, Role.MTP_EXPERT: 8}.get(rule.role, 5)
        parts = random_exl3(rule.padded, bits, generator, scale=0.03)
        parts["svh"][rule.out_features :] = 0
        return parts

    tensors: dict[str, Tensor] = {}
    for rule in census(config).values():
        if rule.quantized:
            parts = (encode or noise)(rule)
            tensors |= {f"{rule.module}.{part}": value for part, value in parts.items()}
        else:
            tensors[rule.name] = source.read(rule.source)
    return ShardedSource.open(write_checkpoint(root, tensors, shards=3, config=config_json(config)))
