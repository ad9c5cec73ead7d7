"""Synthetic encoded layers at GLM-5.3's shapes, and plain torch beside them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exl3.codebook import codebook_table, marker_tensor
from ..exl3.hadamard import BLOCK
from ..exl3.linear import decode_weight
from ..exl3.tiles import from_ring, unpack
from ..glm.experts import RoutedExperts

D, INNER, TOKENS, TOP = 6144, 2048, 2048, 8
WIDTHS = [2] * 81 + [3] * 158 + [4] * 17


def linear(k: int, n: int, bits: float, generator: torch.Generator) -> dict[str, Tensor]:
    """A random encoded matrix on the GPU; any words are a legal trellis."""
    words = torch.randint(
        -32768, 32768, (k // 16, n // 16, int(16 * bits)), dtype=torch.int16, device="cuda", generator=generator
    )
    suh, svh = (torch.randn(size, device="cuda", generator=generator).sign() for size in (k, n))
    return {"trellis": words, "suh": (suh * 0.02).half(), "svh": svh.half(), "mul1": marker_tensor("mul1")}


def layer(widths: Sequence[float], seed: int = 0) -> RoutedExperts:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(D, INNER), (D, INNER), (INNER, D)]
    return RoutedExperts([linear(*shape, bits, generator) for bits in widths for shape in shapes])


def torch_decode(trellis: Tensor, suh: Tensor, svh: Tensor) -> Tensor:
    """The plain torch implementation: states, a table, the tile order, and both rotations as matrix products."""
    signs = torch.ones(1, 1, device=trellis.device)
    for _ in range(7):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    h = signs * BLOCK**-0.5
    w = from_ring(codebook_table("mul1", str(trellis.device))[unpack(trellis)])
    k, n = w.shape
    w = (h @ w.view(k // BLOCK, BLOCK, n)).reshape(k, n // BLOCK, BLOCK) @ h
    return (suh.float()[:, None] * w.reshape(k, n) * svh.float()).bfloat16()


def one_token(routed: RoutedExperts, x: Tensor, ids: Sequence[int], weights: Tensor) -> Tensor:
    total = torch.zeros(D, device="cuda")
    for expert, weight in zip(ids, weights, strict=True):
        gate, up, down = (decode_weight(*routed.linears.parts[3 * expert + part]) for part in range(3))
        total += weight * ((F.silu(x @ gate) * (x @ up)) @ down)
    return total
