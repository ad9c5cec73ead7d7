"""FP8 sources: weights in F8_E4M3 with one float32 scale per block of 128 x 128, read as BF16.

A weight `X.weight` is worth its FP8 value times the scale of its block in `X.weight_scale_inv` (the public
convention of DeepSeek's and GLM's FP8 checkpoints). Every scale belongs to exactly one weight and the reverse.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keys35.errors import SourceError
from keys35.files.headers import TensorEntry

BLOCK = 128
SCALE = "_scale_inv"
OTHER_SCALES = (".weight_scale", ".input_scale", ".scale")


def pair_scales(root: Path, entries: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> dict[str, str]:
    """FP8 weight -> its scale tensor; raises SourceError for a scale or weight without its other half."""
    weights = [name for name, entry in entries.items() if entry.dtype.startswith("F8_")]
    pairs = {name: name + SCALE for name in weights}
    faults = [f"{name} has no {scale}" for name, scale in pairs.items() if scale not in entries]
    scales = {name for name in entries if name.endswith((SCALE, *OTHER_SCALES))}
    faults += [f"{name} scales nothing" for name in sorted(scales - set(pairs.values()))]
    for name, scale in pairs.items():
        if scale in entries:
            faults += _shape_faults(entries[name], entries[scale])
    block = (config.get("quantization_config") or {}).get("weight_block_size", [BLOCK, BLOCK])
    if block != [BLOCK, BLOCK]:
        faults.append(f"config.json says weight_block_size {block}, known is {[BLOCK, BLOCK]}")
    if not weights:
        faults.append("no weight is FP8: leave --fp8 (source.fp8) away")
    if faults:
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise SourceError(f"{root}: cannot be read as an FP8 source:\n  " + "\n  ".join(faults[:10]) + more)
    return pairs


def _shape_faults(weight: TensorEntry, scale: TensorEntry) -> list[str]:
    if weight.dtype != "F8_E4M3" or scale.dtype not in ("F32", "BF16") or len(weight.shape) != 2:
        return [f"{weight.name} is {weight.dtype} {list(weight.shape)} with a {scale.dtype} scale; known are F8_E4M3 "
                "matrices with F32 or BF16 scales"]
    wanted = tuple(-(-size // BLOCK) for size in weight.shape)
    if scale.shape != wanted:
        return [f"{scale.name} has shape {list(scale.shape)}, {list(wanted)} blocks of {BLOCK} cover its weight"]
    return []


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """BF16 (rows, columns) of an FP8 matrix and its scales (ceil(rows / 128), ceil(columns / 128))."""
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=torch.bfloat16)
    for number, row in enumerate(scale.float()):  # a block row at a time, so that float32 never holds the whole
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        result[part] = weight[part].float() * row.repeat_interleave(BLOCK)[:columns]
    return result
