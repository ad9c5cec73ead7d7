"""What the parts of a decoder layer share: its weights, who watches it, and how ranks sum up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from keys35.glm.config import GlmConfig


class LayerWeights(Protocol):
    """The weights of one layer; names are relative to model.layers.{layer}."""

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, say "input_layernorm.weight"."""

    def linear(self, module: str, x: Tensor) -> Tensor:
        """x (N, in) through a linear, say "mlp.experts.3.up_proj"; (N, out), or a rank's share of it."""

    def partial(self, module: str, x: Tensor) -> Tensor:
        """The same where ranks cut the inputs: what each of the store's shares adds to it, (shares, N, out)."""

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor | None:
        """All routed experts at once, rows (N, d), ids, weights (N, k): float32 (shares, N, d); None: one by one."""


class Observer:
    """Watches what flows through a layer; this one ignores everything, calibration overrides it.

    `where` is int64 (N, 2): the sequence (its index among the layer's windows) and position of each row.
    """

    def linear_input(self, modules: tuple[str, ...], rows: Tensor, where: Tensor) -> None:
        """Rows (N, in) that enter all of `modules` (full names, "model.layers.3.self_attn.q_b_proj")."""

    def moe(
        self,
        layer: int,
        rows: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        routed: Tensor,
        where: Tensor,
    ) -> None:
        """Rows (N, d), their k experts and float32 weights (N, k), and the routed experts' output (N, d)."""


def sum_shares(parts: Tensor) -> Tensor:
    """The sum over the first axis, float32 or better: neighbours first, then neighbouring sums, and so on.

    A rank that holds 1, 2 or 4 neighbours of eight adds up a branch of the same tree, so the total has the same bits
    however many ranks there are.
    """
    sums = list(wide(parts).unbind(0))
    while len(sums) > 1:
        pairs = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + sums[2 * len(pairs) :]
    return sums[0]


@dataclass(frozen=True)
class Block:
    """What every part of a layer needs to know; `reduce` sums this rank's and the others' shares (shares, N, d)."""

    config: GlmConfig
    layer: int
    weights: LayerWeights
    observer: Observer
    reduce: Callable[[Tensor], Tensor]

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, self.weights.tensor(f"{name}.weight"), eps or self.config.rms_norm_eps)

    def linear(self, module: str, x: Tensor) -> Tensor:
        return self.weights.linear(module, x)

    def partial(self, module: str, x: Tensor) -> Tensor:
        """This rank's shares of a linear whose inputs are cut, float32 or better (shares, N, out)."""
        return wide(self.weights.partial(module, x))

    def seen(self, modules: Sequence[str], rows: Tensor, where: Tensor) -> None:
        self.observer.linear_input(tuple(f"model.layers.{self.layer}.{name}" for name in modules), rows, where)


def wide(x: Tensor) -> Tensor:
    """At least float32: what sums, scores and choices are made in, whatever the weights are."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; the division happens in float32."""
    broad = wide(x)
    return weight * (broad * torch.rsqrt(broad.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
