"""What a linear should be on the inputs that a quantized prefix gives it: it takes back what it can of their errors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from keys35.calibration.solve import can_be_fitted, probes, ridge_fit
from keys35.precision import whole_products

RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)  # shares of the mean diagonal that hold a fit near the source's weights


class PairedInputs:
    """Sums over the inputs of a linear for the same tokens: x of the source's prefix, q of the quantized one.

    Kept in two halves of the tokens, so that each judges what was fitted on the other: q^T q and q^T (x - q), float32
    (in, in).
    """

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, Tensor]] = []
        self.rows = 0

    def add(self, source: Tensor, found: Tensor, half: Tensor) -> None:
        """Rows x and q (n, in), multiplied by the root of what they count for; half bool (n,)."""
        if not self._sums:
            size = found.shape[1]
            self._sums = [(found.new_zeros(size, size), found.new_zeros(size, size)) for _ in range(2)]
        self.rows += len(found)
        with whole_products():  # a forward pass that is watched may be in short ones
            for side, (gram, cross) in zip((half, ~half), self._sums, strict=True):
                q = found[side]
                gram += q.T @ q
                cross += q.T @ (source[side] - q)

    def hessian(self) -> Tensor:
        """Mean of q q^T over all rows, float32 (in, in)."""
        return (self._sums[0][0] + self._sums[1][0]) / self.rows

    def corrected(self, weight: Tensor) -> Tensor:
        """The weight (in, out) to encode: weight + share (q^T q + ridge)^-1 q^T (x - q) weight.

        With it the linear's output on q is nearest to the source's on x. Ridge and share are those whose fit to half of
        the rows does best on the other half, in some of the outputs; the weight stays as it is where none does good, or
        with hardly any rows.
        """
        if not can_be_fitted(weight, self.rows):
            return weight
        grams, crosses = zip(*self._sums, strict=True)
        some = probes(weight)
        matches = [cross @ some for cross in crosses]
        best = max((self._judged(ridge, grams, matches) for ridge in RIDGES), key=lambda found: found[0])
        gain, share, ridge = best
        if not gain > 0:
            return weight
        return weight + share * ridge_fit(grams[0] + grams[1], (crosses[0] + crosses[1]) @ weight, ridge)

    @staticmethod
    def _judged(ridge: float, grams: Sequence[Tensor], matches: Sequence[Tensor]) -> tuple[float, float, float]:
        """By how much a ridge's fits lower the squared error on the other halves, at the best share; that and it."""
        linear, square = 0.0, 0.0
        for mine, other in ((0, 1), (1, 0)):
            fit = ridge_fit(grams[mine], matches[mine], ridge)
            linear += float((fit * matches[other]).sum(-1, dtype=torch.float64).sum())
            square += float((fit * (grams[other] @ fit)).sum(-1, dtype=torch.float64).sum())
        share = min(1.0, linear / square) if square > 0 else 0.0
        return share * (2 * linear - share * square), share, ridge
