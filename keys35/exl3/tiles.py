"""Tile order and the tail-biting bit stream (format notes 1.4 to 1.6).

A tile is 16 x 16 weights laid on a ring of 256 positions. Position p adds D(p) bits to a circular stream of
256 K bits; its state is the 16 stream bits that end there.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..errors import EncodeError

TILE = 16
RING = 256
WIDTHS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
_WIDTH_LIST = ", ".join(f"{width:g}" for width in WIDTHS)


@lru_cache
def ring_order(device: str = "cpu") -> Tensor:
    """Row-major index (16 * row + column) in its tile of each ring position, int64 (256,)."""
    p = torch.arange(RING, device=device)
    lane, j = p >> 3, p & 7
    row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * (j >> 2)
    return TILE * row + column


@lru_cache
def _ring_inverse(device: str) -> Tensor:
    return torch.argsort(ring_order(device))


def to_ring(weight: Tensor) -> Tensor:
    """Cut (..., k, n) into tiles in ring order, (..., k/16, n/16, 256)."""
    *batch, k, n = weight.shape
    tiles = weight.reshape(*batch, k // TILE, TILE, n // TILE, TILE).transpose(-3, -2)
    return tiles.reshape(*batch, k // TILE, n // TILE, RING)[..., ring_order(str(weight.device))]


def from_ring(tiles: Tensor) -> Tensor:
    """Put tiles in ring order, (..., k/16, n/16, 256), back together as (..., k, n)."""
    *batch, rows, columns, _ = tiles.shape
    tiles = tiles[..., _ring_inverse(str(tiles.device))].reshape(*batch, rows, columns, TILE, TILE)
    return tiles.transpose(-3, -2).reshape(*batch, rows * TILE, columns * TILE)


def symbol_bits(bits: float) -> list[int]:
    """D(p), the new stream bits of each of the 256 positions; half rates alternate floor and ceiling."""
    if bits not in WIDTHS:
        raise EncodeError(f"EXL3 has no width of {bits} bits per weight; use one of {_WIDTH_LIST}")
    whole = int(bits)
    return [whole + (bits != whole and p % 2) for p in range(RING)]


@lru_cache
def _stream_layout(bits: float, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Index arrays of the stream: word, shift (unpack); position, overshoot, take (pack); word order."""
    new = torch.tensor(symbol_bits(bits))
    ends = new.cumsum(0)  # S(p)
    words = int(ends[-1]) // 16
    start = (ends - 16) % int(ends[-1])
    word, offset = start // 16, start % 16
    # word q of the stream ends in the symbol of this position, `over` bits before that symbol ends
    position = torch.searchsorted(ends, 16 * torch.arange(1, words + 1))
    over = ends[position] - 16 * torch.arange(1, words + 1)
    take = new[position] - over
    swapped = torch.arange(words) ^ 1  # 32-bit words hold the earlier 16 bits in their upper half
    return tuple(t.to(device) for t in (word, 16 - offset, position, over, take, swapped))  # type: ignore[return-value]


def pack(states: Tensor, bits: float) -> Tensor:
    """Pack rings of states into the stored words.

    Shapes: integer states (..., 256), overlapping as the trellis demands; int16 (..., 16 * bits).
    """
    _, _, position, over, take, swapped = _stream_layout(float(bits), str(states.device))
    s = states.to(torch.int32) & 0xFFFF
    older = (s[..., position - 1] << take) & 0xFFFF
    newer = (s[..., position] >> over) & ((1 << take) - 1)
    return (older | newer)[..., swapped].to(torch.int16)


def unpack(trellis: Tensor) -> Tensor:
    """Read the 256 states of every tile: int16 (..., 16 * bits) to int32 (..., 256) in 0..65535."""
    word, shift, _, _, _, swapped = _stream_layout(bits_of(trellis.shape), str(trellis.device))
    stream = (trellis.to(torch.int32) & 0xFFFF)[..., swapped].to(torch.int64)
    pair = (stream[..., word] << 16) | stream[..., (word + 1) % stream.shape[-1]]
    return ((pair >> shift) & 0xFFFF).to(torch.int32)


def bits_of(trellis_shape: torch.Size | tuple[int, ...]) -> float:
    """Bits per weight of a trellis, from its last dimension."""
    return trellis_shape[-1] / TILE
