"""exllamav3's own encoder on the same inputs; imported only when it is asked for."""

import torch
from torch import Tensor

from ..exl3.linear import EncodedLinear
from ..exl3.viterbi.peer import quantizer
from .layers import Batch

LARGEST_GROUP = 16
"""Matrices of an expert's size that exllamav3 groups at most: 32,768 columns, or a stack of sixteen."""


def encode_tiles(tiles: Tensor, bits: int) -> Tensor:
    """States of tiles in ring order, int16 (T, 256), by the kernel exllamav3 selects for this GPU."""
    return quantizer().quantize_tiles(tiles, {"K": bits, "mul1": True})[1]


def release() -> None:
    """Free the buffers that exllamav3 keeps between calls."""
    quantizer().get_temp_buffers.cache_clear()
    torch.cuda.empty_cache()


def encode_batch(batch: Batch, bits: int) -> dict[tuple[str, float], EncodedLinear]:
    """What exllamav3's batch function makes of a batch, with its defaults."""
    device = torch.device("cuda", torch.cuda.current_device())
    captured = {
        name: {
            "H": hessian.to(device), "count": 1, "finalized": False, "num_total": 1, "first_key": name,
            "device": device, "inf_nan": torch.zeros(2, device=device),
        }
        for name, hessian in batch.hessians.items()
    }  # fmt: skip
    settings = [
        {"K": bits, "mul1": True, "devices": [device], "device_ratios": None, "apply_out_scales": None, "seed": 0}
        for _ in batch.jobs
    ]
    weights = [job.weight for job in batch.jobs]
    found = quantizer().quantize_exl3_batch(weights, [captured[job.hessian] for job in batch.jobs], settings)
    return {
        (job.name, float(bits)): EncodedLinear(
            parts["trellis"], parts["suh"], parts["svh"], float(bits), float(error), False
        )
        for job, (error, parts) in zip(batch.jobs, found, strict=True)
    }
