"""Block LDLQ: round sixteen rows at a time and hand their error to the rows still to come (format notes 2.7).

Matrices of one shape advance together, one Viterbi call a step for all of them. Products are made matrix by
matrix: a batched one may round differently for another batch size, and bytes must not depend on the company. They are
short ones: an error that is handed on is far larger than what they round off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..precision import short_products
from .codebook import codebook_table
from .hadamard import BLOCK
from .scale import tile_scale
from .tiles import RING, TILE, from_ring, to_ring
from .viterbi import ViterbiBackend


def ldlq(
    weights: Tensor, feedbacks: Sequence[Tensor | None], bits: float, backend: ViterbiBackend
) -> tuple[Tensor, Tensor]:
    """Encode a stack of rotated weights.

    Shapes: weights float32 (B, k, n); feedbacks B times (k, k) or None (no feedback); returns states as int16
    (B, k/16, n/16, 256) and the scales (B, k/128) that the tiles of each 128 rows were multiplied by.
    """
    count, k, n = weights.shape
    target = weights.clone()  # the weight plus what later rows left to correct
    errors = torch.zeros_like(weights)
    states = torch.empty(count, k // TILE, n // TILE, RING, dtype=torch.int16, device=weights.device)
    scales = torch.empty(count, k // BLOCK, device=weights.device)
    table = codebook_table("mul1", str(weights.device))
    for stop in range(k, 0, -BLOCK):
        start = stop - BLOCK
        span = slice(start, stop)
        for b, feedback in enumerate(feedbacks):
            within = None if feedback is None else feedback[span, span]
            scales[b, start // BLOCK] = tile_scale(target[b, span], within, bits)
        scale = scales[:, start // BLOCK, None, None]
        for row in range(stop - TILE, start - TILE, -TILE):
            rows = slice(row, row + TILE)
            tiles = to_ring(target[:, rows] * scale)
            found = backend.encode_tiles(tiles.view(-1, RING), bits).view(torch.int16).view(tiles.shape)
            states[:, row // TILE] = found[:, 0]
            decoded = from_ring(table[found.int() & 0xFFFF]) / scale
            errors[:, rows] = weights[:, rows] - decoded
            _feed_back(target, errors, feedbacks, rows, slice(start, row))
        _feed_back(target, errors, feedbacks, span, slice(0, start))
    return states, scales


def _feed_back(
    target: Tensor, errors: Tensor, feedbacks: Sequence[Tensor | None], source: slice, sink: slice
) -> None:
    if sink.start == sink.stop:
        return
    with short_products(target.device):
        for b, feedback in enumerate(feedbacks):
            if feedback is not None:
                target[b, sink].addmm_(feedback[source, sink].T, errors[b, source])
