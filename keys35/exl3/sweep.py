"""Search finished tiles again, each row of tiles given all the others, and keep what lowers the error.

LDLQ chooses sixteen rows knowing the errors of those before them, not of those after. Here the other rows' errors are
all known: they pull the rows' target, and a tile found for it stays only where tr(E^T H E) falls.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .codebook import codebook_table
from .hadamard import BLOCK
from .tiles import RING, TILE, from_ring, to_ring
from .viterbi import ViterbiBackend


def sweep(
    weights: Tensor, metrics: Sequence[Tensor | None], states: Tensor, scales: Tensor, bits: float,
    backend: ViterbiBackend,
) -> Tensor:
    """One pass over all rows of tiles of what `ldlq` returned; the states that are left, int16.

    Shapes: weights float32 (B, k, n), as `ldlq` had them; metrics B times (k, k), rotated and damped, or None, which
    leaves a weight as it is; states (B, k/16, n/16, 256); scales (B, k/128).
    """
    table, states = codebook_table("mul1", str(weights.device)), states.clone()
    scale = scales.repeat_interleave(BLOCK // TILE, 1)[:, :, None, None]

    def decode(found: Tensor, row: int) -> Tensor:
        return from_ring(table[found.int() & 0xFFFF]) / scale[:, row]

    rows = range(states.shape[1])
    errors = weights - torch.cat([decode(states[:, row, None], row) for row in rows], 1)
    pulls = [None if metric is None else metric @ errors[b] for b, metric in enumerate(metrics)]
    inverses = [None if metric is None else torch.linalg.inv(_diagonal_blocks(metric)) for metric in metrics]
    for row in reversed(rows):
        span = slice(row * TILE, (row + 1) * TILE)
        old = errors[:, span]
        target = weights[:, span] - old
        for b, pull in enumerate(pulls):
            if pull is not None:
                target[b] += inverses[b][row] @ pull[span]
        tiles = to_ring(target * scale[:, row])
        found = backend.encode_tiles(tiles.view(-1, RING), bits).view(torch.int16).view(tiles.shape)
        change = weights[:, span] - decode(found, row) - old
        for b, pull in enumerate(pulls):
            if pull is None:
                continue
            better = _rise(change[b], metrics[b][span, span], pull[span]) < 0
            states[b, row] = torch.where(better[:, None], found[b, 0], states[b, row])
            change[b] *= better.repeat_interleave(TILE)
            pull.addmm_(metrics[b][:, span], change[b])
            errors[b, span] += change[b]
    return states


def _rise(change: Tensor, block: Tensor, pull: Tensor) -> Tensor:
    """By how much tr(E^T H E) rises with a change (16, n) of 16 rows, tile by tile (n/16,); pull: those rows of H E."""
    return (change * (block @ change + 2 * pull)).sum(0).view(-1, TILE).sum(1)


def _diagonal_blocks(metric: Tensor) -> Tensor:
    """(k/16, 16, 16) of a (k, k) matrix."""
    count = len(metric) // TILE
    places = torch.arange(count, device=metric.device)
    return metric.view(count, TILE, count, TILE)[places, :, places]
