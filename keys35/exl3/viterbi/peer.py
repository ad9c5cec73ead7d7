"""exllamav3's kernels behind the same interface: for comparison, and for GPUs that ours do not support."""

from types import ModuleType

import torch
from torch import Tensor

from ...errors import EncodeError
from ..tiles import RING, symbol_bits


def quantizer() -> ModuleType:
    """exllamav3's quantizer module. Raises ImportError where exllamav3 or its extension is missing."""
    from exllamav3.modules.quant.exl3_lib import quantize

    return quantize


class PeerBackend:
    """The tile encoder of exllamav3, on torch's current CUDA device."""

    name = "exllamav3"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise EncodeError("the exllamav3 backend needs a CUDA device; use auto or cpu")
        self._quantizer = quantizer()

    def encode_tiles(self, tiles: Tensor, bits: float) -> Tensor:
        """float32 (T, 256) in ring order, at mul1's scale, to int16 states (T, 256).

        Raises EncodeError for another shape, or a width that EXL3 does not have.
        """
        symbol_bits(bits)
        if tiles.ndim != 2 or tiles.shape[1] != RING:
            raise EncodeError(f"tiles must have shape (T, {RING}), found {tuple(tiles.shape)}")
        rate = int(bits) if bits == int(bits) else bits
        settings = {"K": rate, "mul1": True}
        return self._quantizer.quantize_tiles(tiles.to("cuda", torch.float32), settings)[1].to(tiles.device)
