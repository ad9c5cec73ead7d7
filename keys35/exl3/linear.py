"""One encoded linear layer and its decoding (format notes 1.1 and 1.8)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .codebook import codebook_table, marker_tensor
from .gpu import usable
from .gpu.rotate import reconstruct
from .hadamard import rotate_both
from .tiles import bits_of, from_ring, unpack

__all__ = ["EncodedLinear", "bits_of", "decode_weight"]


@dataclass(frozen=True)
class EncodedLinear:
    """What a checkpoint stores of one linear layer with k inputs and n outputs (both padded to 128).

    trellis: int16 (k/16, n/16, 16 * bits); suh: fp16 (k,); svh: fp16 (n,); bits: bits per weight.
    proxy_error: tr(E^T H E) / tr(W^T H W) of the decoded weight under the undamped Hessian, dimensionless.
    fallback: no usable Hessian, so the plain squared error was minimised.
    damping: the share of the mean diagonal that was added to the Hessian.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    bits: float
    proxy_error: float
    fallback: bool
    codebook: str = "mul1"
    damping: float = 0.0

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The stored tensors by name, for a module called `prefix`."""
        parts = {"trellis": self.trellis, "suh": self.suh, "svh": self.svh}
        if self.codebook != "3inst":
            parts[self.codebook] = marker_tensor(self.codebook)
        return {f"{prefix}.{part}": tensor for part, tensor in parts.items()}


def decode_weight(
    trellis: Tensor, suh: Tensor, svh: Tensor, codebook: str = "mul1", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Reconstruct diag(suh) Hk Wq Hn diag(svh), computed in float32.

    Shapes: int16 (k/16, n/16, 16 * bits), fp16 (k,), fp16 (n,); (k, n) of a dtype, inputs first.
    """
    if codebook == "mul1" and trellis.is_cuda and usable(trellis.device.index):
        return reconstruct(trellis, (suh.half(), svh.half()), dtype)
    rotated = from_ring(codebook_table(codebook, str(trellis.device))[unpack(trellis)])
    return (suh.float()[:, None] * rotate_both(rotated) * svh.float()).to(dtype)
