"""Encoded matrices that stay encoded: decoded in bulk for many rows, or multiplied straight from the trellis for one.

A GPU does either in one launch for as many matrices as are asked for, each with its own width; a CPU does them in turn.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import EncodeError
from .codebook import MARKERS
from .gpu import usable
from .hadamard import rotate_both, rotate_in
from .linear import decode_weight
from .tiles import TILE, bits_of


class PackedLinears:
    """Matrices as their stored parts ("trellis", "suh", "svh", a codebook's marker), on one device.

    Raises EncodeError when their codebooks differ.
    """

    def __init__(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.parts = [
            (p["trellis"].contiguous(), p["suh"].half().contiguous(), p["svh"].half().contiguous()) for p in parts
        ]
        books = {codebook_of(p) for p in parts}
        if len(books) != 1:
            raise EncodeError(f"matrices of one layer mix the codebooks {', '.join(sorted(books))}; encode it again")
        [self.codebook] = books
        trellises = [trellis for trellis, _, _ in self.parts]
        self.shapes = [(t.shape[0] * TILE, t.shape[1] * TILE) for t in trellises]
        self.wide = max(bits_of(t.shape) for t in trellises) > 4
        device = trellises[0].device
        self.on_gpu = device.type == "cuda" and usable(device.index)
        if self.on_gpu:
            from .gpu.packed import describe

            self.table = describe(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored parts."""
        return sum(part.nbytes for parts in self.parts for part in parts)

    def reconstruct_into(self, which: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Decode matrices `which` into (k, n) tensors of one dtype, inputs first, rows of unit stride.

        A GPU's bfloat16 and half results are within one rounding of `decode_weight`'s; all others are its own.
        """
        if self.on_gpu and outs[0].dtype in (torch.bfloat16, torch.float16):
            from .gpu.packed import reconstruct_into

            reconstruct_into(self.table, which, outs, self.codebook)
            return
        for index, out in zip(which, outs, strict=True):
            out.copy_(self._decode(index))

    def _decode(self, index: int) -> Tensor:
        trellis, suh, svh = self.parts[index]
        if trellis.is_cuda:
            return decode_weight(trellis, suh, svh, self.codebook)
        from .packed_cpu import decode_rotated

        return suh.float()[:, None] * rotate_both(decode_rotated(trellis, self.codebook)) * svh.float()

    def multiply(self, which: Sequence[int], x: Tensor) -> Tensor:
        """x[i] W[which[i]] in float32: x (count, k), result (count, n), matrices of one shape."""
        if self.on_gpu:
            from .gpu.packed import matvec

            chosen = torch.tensor(which, dtype=torch.int32).to(x.device)
            return matvec(
                self.table, chosen, x.float().contiguous(), self.shapes[which[0]][1], self.codebook, wide=self.wide
            )
        return torch.stack([self._multiply(index, row) for index, row in zip(which, x.float(), strict=True)])

    def _multiply(self, index: int, row: Tensor) -> Tensor:
        trellis, suh, svh = self.parts[index]
        if row.is_cuda:
            return row @ decode_weight(trellis, suh, svh, self.codebook)
        from .packed_cpu import multiply_rotated

        rotated = rotate_in((row * suh.float())[:, None]).T
        product = multiply_rotated(trellis, rotated, self.codebook)
        return rotate_in(product.T)[:, 0] * svh.float()

    def experts(self, chosen: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """Sum over each token's experts of weight * down(silu(gate x) * up x), float32 (T, d), for a few tokens.

        The matrices are gate, up and down of expert 0, then of 1, and so on; chosen integer (T, k), weights (T, k),
        x (T, d).
        """
        if self.on_gpu:
            from .gpu.packed import experts

            arguments = (chosen.int().contiguous(), weights.float().contiguous(), x.float().contiguous())
            return experts(self.table, *arguments, self.shapes[0][1], self.codebook, wide=self.wide)
        out = torch.zeros(x.shape, device=x.device)
        for token, (row, ids) in enumerate(zip(x.float(), chosen.tolist(), strict=True)):
            for slot, expert in enumerate(ids):
                gate, up = self.multiply([3 * expert, 3 * expert + 1], torch.stack([row, row]))
                hidden = torch.nn.functional.silu(gate) * up
                out[token] += weights[token, slot] * self.multiply([3 * expert + 2], hidden[None])[0]
        return out


def codebook_of(parts: Mapping[str, Tensor]) -> str:
    """The codebook that the marker beside a trellis names; 3inst has none."""
    return next((name for name in MARKERS if name in parts), "3inst")
