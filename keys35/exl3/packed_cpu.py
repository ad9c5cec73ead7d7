"""Encoded matrices on a CPU: decoding, and products with vectors straight from the trellis."""

import numba
import numpy as np
import torch
from torch import Tensor

from .codebook import codebook_table
from .tiles import RING, TILE, _stream_layout, bits_of, ring_order

_ROWS, _COLUMNS = (ring_order() // TILE).numpy(), (ring_order() % TILE).numpy()


@numba.njit(cache=True, nogil=True)
def _state(stream, word, shift):
    """16 bits of a tile's stream, whose 16-bit chunks are stored pairwise swapped."""
    after = word + 1 if word + 1 < stream.size else 0
    return ((np.uint32(stream[word ^ 1]) << 16 | np.uint32(stream[after ^ 1])) >> np.uint32(shift)) & 0xFFFF


@numba.njit(cache=True, nogil=True)
def _decode(trellis, words, shifts, table, rows, columns, out):
    for a in range(trellis.shape[0]):
        for c in range(trellis.shape[1]):
            for p in range(RING):
                value = table[_state(trellis[a, c], words[p], shifts[p])]
                out[TILE * a + rows[p], TILE * c + columns[p]] = value


@numba.njit(cache=True, nogil=True)
def _multiply(trellis, words, shifts, table, rows, columns, x, out):
    for a in range(trellis.shape[0]):
        for c in range(trellis.shape[1]):
            for p in range(RING):
                value = table[_state(trellis[a, c], words[p], shifts[p])]
                for i in range(x.shape[0]):
                    out[i, TILE * c + columns[p]] += x[i, TILE * a + rows[p]] * value


def _stream(trellis: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    word, shift, *_ = _stream_layout(bits_of(trellis.shape), "cpu")
    return trellis.contiguous().numpy().view(np.uint16), word.numpy(), shift.numpy()


def decode_rotated(trellis: Tensor, codebook: str) -> Tensor:
    """The codebook values of a trellis, still rotated: float32 (k, n) of int16 (k/16, n/16, 16 * bits)."""
    out = torch.empty(trellis.shape[0] * TILE, trellis.shape[1] * TILE)
    _decode(*_stream(trellis), codebook_table(codebook).numpy(), _ROWS, _COLUMNS, out.numpy())
    return out


def multiply_rotated(trellis: Tensor, x: Tensor, codebook: str) -> Tensor:
    """x (count, k) times the rotated matrix, float32 (count, n), without a decoded copy of it."""
    out = torch.zeros(len(x), trellis.shape[1] * TILE)
    _multiply(*_stream(trellis), codebook_table(codebook).numpy(), _ROWS, _COLUMNS, x.contiguous().numpy(), out.numpy())
    return out
