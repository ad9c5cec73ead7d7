"""A layer's routed experts as they are stored: fused for a few tokens, decoded in groups for many."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from keys35.exl3.packed import PackedLinears

FEW_TOKENS = 4  # so few are multiplied straight from the trellis
GROUP_BYTES = 2 << 30  # decoded experts held at a time: the fastest on an H200 of 2, 5 and 40 GiB


class RoutedExperts:
    """Experts given as the stored parts of gate, up and down of the first, of the second, and so on."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.linears = PackedLinears(parts)
        self.outer, self.inner = self.linears.shapes[0]

    @torch.no_grad()
    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor, shares: int = 1) -> Tensor:
        """Shares of the sum of weight * expert output, float32 (shares, N, d): rows (N, d), experts, weights (N, k).

        Products are taken in the rows' dtype, sums in float32 and in ascending order of experts, so they repeat.
        """
        if shares == 1 and len(rows) <= FEW_TOKENS:
            return self.linears.experts(ids, weights, rows)[None]
        ids, order = ids.sort(-1)
        outputs = self._outputs(rows, ids, shares)
        total = torch.zeros(shares, *rows.shape, device=rows.device)
        for slot, weight in enumerate(weights.gather(1, order).float().unbind(1)):
            total.addcmul_(outputs[:, :, slot].float(), weight[:, None])
        return total

    def _outputs(self, rows: Tensor, ids: Tensor, shares: int) -> Tensor:
        """What each share of each row's experts makes of it, (shares, N, k, d)."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        gathered = rows[order // ids.shape[1]]
        counts = torch.bincount(flat, minlength=len(self.linears) // 3).tolist()
        outputs, start, width = gathered.new_empty(shares, *gathered.shape), 0, self.inner // shares
        for group, gate_up, down in self._decoded([e for e, count in enumerate(counts) if count], rows.dtype):
            sizes = [counts[expert] for expert in group]
            part = slice(start, start := start + sum(sizes))
            if shares == 1:
                gate, up = grouped_product(gathered[part], gate_up, sizes).chunk(2, -1)
                outputs[0, part] = grouped_product(F.silu(gate) * up, down, sizes)
                continue
            for share in range(shares):  # every product in the shapes that it has on any number of ranks
                cut = slice(share * width, (share + 1) * width)
                gate, up = (grouped_product(gathered[part], half[..., cut], sizes) for half in gate_up.chunk(2, -1))
                outputs[share, part] = grouped_product(F.silu(gate) * up, down[:, cut], sizes)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return outputs[:, back].unflatten(1, ids.shape)

    def _decoded(self, active: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
        """Groups of experts with gate and up side by side (E, d, 2f) and down (E, f, d); buffers are used again."""
        one = 3 * self.outer * self.inner * dtype.itemsize
        size = min(len(active), max(1, GROUP_BYTES // one))
        device = self.linears.parts[0][0].device
        gate_up = torch.empty(size, self.outer, 2 * self.inner, dtype=dtype, device=device)
        down = torch.empty(size, self.inner, self.outer, dtype=dtype, device=device)
        for start in range(0, len(active), size):
            group = active[start : start + size]
            which = [3 * expert + part for expert in group for part in range(3)]
            outs = [
                out for i in range(len(group))
                for out in (gate_up[i, :, : self.inner], gate_up[i, :, self.inner :], down[i])
            ]  # fmt: skip
            self.linears.reconstruct_into(which, outs)
            yield group, gate_up[: len(group)], down[: len(group)]


def grouped_product(rows: Tensor, matrices: Tensor, sizes: Sequence[int]) -> Tensor:
    """Consecutive runs of rows (N, k), `sizes` long, each times its own matrix of (E, k, n); (N, n)."""
    if _has_grouped(rows) and matrices.is_contiguous():
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        return torch._grouped_mm(rows, matrices, offs=ends)
    out = torch.empty(len(rows), matrices.shape[-1], dtype=rows.dtype, device=rows.device)
    for part, matrix, result in zip(rows.split(list(sizes)), matrices, out.split(list(sizes)), strict=True):
        torch.mm(part, matrix, out=result)
    return out


def _has_grouped(rows: Tensor) -> bool:
    """Whether torch has a kernel for it here: bfloat16 on Hopper, where one launch beats one per expert."""
    here = rows.is_cuda and rows.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
    return here and torch.cuda.get_device_capability(rows.device) == (9, 0)
