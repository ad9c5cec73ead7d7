"""What one layer's calibration pass leaves behind: Hessians of its linears' inputs, and its MoE rows."""

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from keys35.glm.block import Observer
from keys35.host import fill
from keys35.precision import short_products, vector_sum
from keys35.recipe import Calibration

SHARED_INPUT = "mlp.shared_experts.gate_proj"  # sees every token, as the routed experts' common input does
ALL_TOKEN_ROWS = 4096
BLOCK = 2048


@dataclass(frozen=True)
class MoeRows:
    """Inputs and routing of one MoE layer, in window order.

    x (T, d), float32 or bfloat16; expert_ids int64 (T, k); weights float32 (T, k).
    """

    x: Tensor
    expert_ids: Tensor
    weights: Tensor

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Indices (n,) of the rows routed to an expert, and the router weight (n,) its output gets there."""
        row, slot = torch.nonzero(self.expert_ids == expert, as_tuple=True)
        return row, self.weights[row, slot]

    def counts(self, experts: int) -> Tensor:
        """How many rows each of so many experts is chosen by, int64 (experts,)."""
        return torch.bincount(self.expert_ids.flatten(), minlength=experts)

    def spread(self, count: int, length: int) -> "MoeRows":
        """The rows of `count` of the windows of so many rows, as far apart as they lie."""
        windows = len(self.x) // length
        rows = torch.cat([torch.arange(length) + place * windows // count * length for place in range(count)])
        return MoeRows(self.x[rows], self.expert_ids[rows], self.weights[rows])

    def to(self, device: torch.device) -> "MoeRows":
        """The same rows on a device."""
        return MoeRows(self.x.to(device), self.expert_ids.to(device), self.weights.to(device))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The rows as named tensors for the work directory."""
        ids = self.expert_ids.to(torch.int32)
        return {f"{prefix}.x": self.x, f"{prefix}.expert_ids": ids, f"{prefix}.weights": self.weights}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str) -> "MoeRows":
        """The inverse of `tensors`."""
        ids = tensors[f"{prefix}.expert_ids"].long()
        return cls(tensors[f"{prefix}.x"], ids, tensors[f"{prefix}.weights"])


Clock = Callable[[str], AbstractContextManager[None]]
"""Times what happens in a block, under a name."""


def _untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Capture(Observer):
    """Watches one layer's forward pass: sums x^T x per distinct input and keeps the MoE rows.

    Hessians are keyed by the first module (without "model.layers.N.") of those that share an input.
    """

    def __init__(
        self, tokens: int, dtype: torch.dtype = torch.float32, hessians: Clock | None = _untimed,
        only: Container[str] | None = None,
    ):
        """tokens: how many rows will come in all; dtype: in what MoE rows are kept; hessians: None for no sums, or
        what times them; only: keys of those that are wanted, None for all."""
        self._timed, self._only = hessians, only
        self._tokens, self._dtype, self._seen = tokens, dtype, 0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._moe: MoeRows | None = None
        self.carrier: dict[str, str] = {}

    def linear_input(self, modules: tuple[str, ...], rows: Tensor, where: Tensor) -> None:
        """All `modules` take these rows (n, in_features); the first one carries the Hessian for all."""
        if self._timed is None:
            return
        names = [module.split(".", 3)[3] for module in modules]
        key = names[0]
        if self._only is not None and key not in self._only:
            return
        with self._timed("Hessians"):
            rows = rows.float()
            if key not in self._sums:
                self._sums[key] = rows.new_zeros(rows.shape[1], rows.shape[1])
            _add_upper(self._sums[key], rows)
        self._counts[key] = self._counts.get(key, 0) + rows.shape[0]
        self.carrier.update(dict.fromkeys(names, key))

    def moe(
        self, layer: int, rows: Tensor, expert_ids: Tensor, expert_weights: Tensor, routed: Tensor, where: Tensor
    ) -> None:
        """A run of windows in order: MoE input (n, d), choice (n, k) and router weights (n, k)."""
        if self._moe is None:
            x = torch.empty(self._tokens, rows.shape[1], dtype=self._dtype)
            ids = torch.empty(self._tokens, expert_ids.shape[1], dtype=torch.int64)
            self._moe = MoeRows(x, ids, torch.empty(ids.shape))
        part = slice(self._seen, self._seen + len(rows))
        for kept, new in ((self._moe.x, rows), (self._moe.expert_ids, expert_ids), (self._moe.weights, expert_weights)):
            fill(kept[part], new)
        self._seen += len(rows)

    def hessians(self) -> dict[str, Tensor]:
        """Mean x^T x per distinct input, keyed by its first linear; float32 (in, in) on the host."""
        return {key: (_mirrored(total) / self._counts[key]).cpu() for key, total in self._sums.items()}

    def moe_rows(self) -> MoeRows | None:
        """All windows' rows in order, None for a dense layer."""
        assert self._moe is None or self._seen == self._tokens, "rows are missing"
        return self._moe


@dataclass(frozen=True)
class ExpertHessians:
    """Mean input Hessians of one expert: `gate_up` (d, d) and `down` (f, f), with the rows behind them."""

    gate_up: Tensor
    down: Tensor
    rows: int
    shrink: float


def expert_hessians(
    rows: MoeRows, layer_hessian: Tensor, expert: int, gate: Tensor, up: Tensor, choice: Calibration
) -> ExpertHessians:
    """Hessians of one routed expert under the recipe's choice; gate and up are (in, out) float32.

    The mixture leans on the layer's all-token statistics by at least `choice.shrink`, and by more when the expert
    has fewer rows than input features; with no rows it is all of it.
    """
    index, router = rows.of(expert)
    router, layer_hessian = router.to(gate.device), layer_hessian.to(gate.device)
    step = max(1, len(rows.x) // ALL_TOKEN_ROWS) | 1  # odd: an even one meets some places of a window more often
    sample = rows.x[::step].to(gate.device).float()
    inner_all = _mean_outer(inner(sample, gate, up), None)
    if choice.hessian == "all":
        return ExpertHessians(layer_hessian, inner_all, len(index), 1.0)
    weight = row_weights(router, choice)
    x = rows.x[index].to(gate.device).float()
    d, f = gate.shape
    share = [max(choice.shrink, width / (width + len(index))) for width in (d, f)]
    if not len(index) or not vector_sum(weight) > 0:
        return ExpertHessians(layer_hessian, inner_all, len(index), 1.0)
    own = _mean_outer(x, weight), _mean_outer(inner(x, gate, up), weight)
    gate_up = own[0].lerp(layer_hessian, share[0])
    down = own[1].lerp(inner_all, share[1])
    return ExpertHessians(gate_up, down, len(index), share[0])


def row_weights(router: Tensor, choice: Calibration) -> Tensor:
    """What an expert's rows count for in its statistics, from the router's weights (n,) of its output there."""
    return router.square() if choice.hessian == "weighted" else torch.ones_like(router)


def inner(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """What the down projection sees: silu(x gate) * (x up)."""
    with short_products(x.device):
        return torch.nn.functional.silu(x @ gate) * (x @ up)


def _mean_outer(x: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of x x^T over rows, weighted when a weight per row is given."""
    total = x.new_zeros(x.shape[1], x.shape[1])
    _add_upper(total, x if weight is None else x * weight.sqrt()[:, None])
    return _mirrored(total).div_(x.shape[0] if weight is None else vector_sum(weight))


def _add_upper(total: Tensor, x: Tensor) -> None:
    """total += x^T x of rows (n, d), without the blocks below the diagonal: less work.

    Short products: the sum is exactly that of rows rounded by some 3e-4, far less than what damping adds.
    """
    with short_products(x.device):
        for first in range(0, len(total), BLOCK):
            total[first : first + BLOCK, first:] += x[:, first : first + BLOCK].T @ x[:, first:]


def _mirrored(total: Tensor) -> Tensor:
    """What `_add_upper` leaves, with the blocks below the diagonal, in place."""
    for first in range(BLOCK, len(total), BLOCK):
        total[first : first + BLOCK, :first] = total[:first, first : first + BLOCK].T
    return total
