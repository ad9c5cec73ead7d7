"""What a linear should be on the inputs that a quantized prefix gives it: it takes back what it can of their errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from keys35.calibration.solve import can_be_fitted, probes, ridge_fit
from keys35.precision import short_products, vector_sum

MOST = 0.5  # of a weight, that making up for what others lose may change it by
Judged = tuple[float, float, float]
"""By how much the squared error falls, with which share of the fit, at which ridge."""
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)  # shares of the mean diagonal that hold a fit near the source's weights


def _square(matrix: Tensor) -> Tensor:
    """The sum of its squares, the same bits for any count of threads."""
    return vector_sum(matrix.square().sum(0))


@dataclass(frozen=True)
class _Sums:
    """Over half of the rows; lost is None where nothing is missing beside the linear's own error."""

    gram: Tensor
    cross: Tensor
    lost: Tensor | None

    @classmethod
    def zeros(cls, rows: Tensor, missing: Tensor | None) -> "_Sums":
        square = rows.shape[1], rows.shape[1]
        lost = None if missing is None else missing.new_zeros(rows.shape[1], missing.shape[1])
        return cls(rows.new_zeros(square), rows.new_zeros(square), lost)

    def match(self, weight: Tensor, some: Callable[[Tensor], Tensor] = lambda whole: whole) -> Tensor:
        """q^T times what the outputs, or some of them, are to gain, (in, out)."""
        with short_products(weight.device):
            found = self.cross @ some(weight)
        return found if self.lost is None else found + some(self.lost)


class PairedInputs:
    """Sums over the inputs of a linear for the same tokens: x of the source's prefix, q of the quantized one.

    Kept in two halves of the tokens, so that one judges what was fitted on the other: q^T q and q^T (x - q), float32
    (in, in), and q^T r, float32 (in, out), where the linear is to make up for r besides.
    """

    def __init__(self) -> None:
        self._sums: list[_Sums] = []
        self.rows = 0

    def add(self, source: Tensor, found: Tensor, half: Tensor, missing: Tensor | None = None) -> None:
        """Rows x and q (n, in), multiplied by the root of what they count for; half bool (n,).

        missing (n, out), multiplied alike: what the state that the linear's output is added to lacks there, r.
        """
        if not self._sums:
            self._sums = [_Sums.zeros(found, missing) for _ in range(2)]
        self.rows += len(found)
        with short_products(found.device):  # of rows rounded by some 3e-4, far less than the least ridge adds
            for side, sums in zip((half, ~half), self._sums, strict=True):
                q = found[side]
                sums.gram.addmm_(q.T, q)
                sums.cross.addmm_(q.T, source[side] - q)
                if missing is not None:
                    sums.lost.addmm_(q.T, missing[side])

    def finish(self) -> Tensor:
        """Mean of q q^T over all rows, float32 (in, in); the sums are dropped, whose room an encoder needs."""
        first, second = self._sums
        self._sums = []
        return (first.gram + second.gram).div_(self.rows)

    def corrected(self, weight: Tensor) -> Tensor:
        """The weight (in, out) to encode: weight + share (q^T q + ridge)^-1 q^T ((x - q) weight + r).

        With it the output on q is nearest to the source's on x, and to what is missing beside it. Ridge and share are
        those whose fit to one half of the rows does best on the other, in some of the outputs; the weight stays as it
        is where none does good, or with hardly any rows. What is missing is left alone where that would take another
        weight, as where states are far larger than anything that is added to them.
        """
        if not can_be_fitted(weight, self.rows):
            return weight
        step = self._step(weight, self._sums)
        if self._sums[0].lost is not None and _square(step) > MOST**2 * _square(weight):
            step = self._step(weight, [replace(sums, lost=None) for sums in self._sums])
        return weight + step

    def _step(self, weight: Tensor, halves: Sequence["_Sums"]) -> Tensor:
        grams = [sums.gram for sums in halves]
        matches = [sums.match(weight, probes) for sums in halves]
        gain, share, ridge = _climb([partial(self._judged, ridge, grams, matches) for ridge in RIDGES])
        if not gain > 0:
            return torch.zeros_like(weight)
        return share * ridge_fit(grams[0] + grams[1], sum(sums.match(weight) for sums in halves), ridge)

    @staticmethod
    def _judged(ridge: float, grams: Sequence[Tensor], matches: Sequence[Tensor]) -> Judged:
        """By how much a ridge's fit to the first half lowers the squared error on the other, at the best share.

        The same the other way round told no more, and takes as many factorisations again.
        """
        fit = ridge_fit(grams[0], matches[0], ridge)
        linear = float((fit * matches[1]).sum(-1, dtype=torch.float64).sum())
        square = float((fit * (grams[1] @ fit)).sum(-1, dtype=torch.float64).sum())
        share = min(1.0, linear / square) if square > 0 else 0.0
        return share * (2 * linear - share * square), share, ridge


def _climb(candidates: Sequence[Callable[[], Judged]]) -> Judged:
    """The best of them, where gains rise to it and fall behind it; from the middle, for each takes factorisations."""
    judged = lru_cache(maxsize=None)(lambda place: candidates[place]())
    place = len(candidates) // 2
    while True:
        around = [place] + [beside for beside in (place - 1, place + 1) if 0 <= beside < len(candidates)]
        best = max(around, key=lambda other: judged(other)[0])
        if best == place:
            return judged(place)
        place = best
