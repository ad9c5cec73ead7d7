"""Hidden states of the calibration windows between two layers, kept on disk so that a killed run goes on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from keys35.files.atomic import save_tensors
from keys35.glm.block import LayerWeights, Observer
from keys35.glm.config import GlmConfig
from keys35.glm.layer import decoder_layer, show_attention
from keys35.glm.names import EMBEDDING
from keys35.glm.weights import WeightStore
from keys35.host import fill, on_host
from keys35.precision import short_products

WINDOWS_AT_ONCE_TOKENS = 8192


@dataclass(frozen=True)
class States:
    """Windows after some layer, on the host or on a GPU with room for them.

    x (N, W, d), float32 or bfloat16; chosen: per window the DSA selection, bool (W, W), or None; broken: the windows
    that had a value which is not finite when they were computed.
    """

    x: Tensor
    chosen: tuple[Tensor | None, ...]
    broken: tuple[int, ...] = ()

    @classmethod
    def start(cls, x: Tensor) -> "States":
        """States of embedded windows, before the first layer."""
        return cls(x, (None,) * x.shape[0])

    @classmethod
    def embedded(cls, store: WeightStore, tokens: Tensor, dtype: torch.dtype) -> "States":
        """Windows of token ids (N, W) through the embedding table, which is read once and dropped."""
        table = store.tensor(EMBEDDING)
        x = torch.empty(*tokens.shape, table.shape[1], dtype=dtype)
        for index, window in enumerate(tokens):
            fill(x[index], table[window.to(table.device)])
        return cls.start(x)

    def advance(
        self,
        config: GlmConfig,
        layer: int,
        weights: LayerWeights,
        device: torch.device,
        at_once: int,
        observer: Observer | None = None,
        in_place: bool = False,
        through: Callable[..., tuple[list[Tensor], list[Tensor | None]]] = decoder_layer,
    ) -> "States":
        """All windows through one layer on a device, so many tokens at a time; in place these states are lost.

        through: the whole layer, or one half of it.
        """
        after = self.x if in_place else torch.empty_like(self.x)
        chosen: list[Tensor | None] = []
        broken: list[int] = []
        for first, windows, selections in self.on_device(device, at_once):
            with short_products(device):
                new, selected = through(config, layer, weights, windows, selections, observer=observer)
            for index, state in enumerate(new, first):
                fill(after[index], state)
            chosen += [None if s is None else s.cpu() for s in selected]
            broken += [first + index for index in _broken(new)]
        return States(after, tuple(chosen), tuple(broken))

    def show_attention(
        self, config: GlmConfig, layer: int, weights: LayerWeights, device: torch.device, at_once: int,
        observer: Observer, mixed: bool,
    ) -> None:
        """All windows as far into a layer as an observer of attention's linears needs; mixed: up to `o_proj`."""
        for _, windows, selections in self.on_device(device, at_once):
            with short_products(device):
                show_attention(config, layer, weights, windows, selections, observer=observer, mixed=mixed)

    def on_device(
        self, device: torch.device, at_once: int
    ) -> Iterator[tuple[int, list[Tensor], list[Tensor | None]]]:
        """A few windows at a time, at most so many tokens: the first one's number, float32 states and selections."""
        step = max(1, at_once // self.x.shape[1])
        for first in range(0, self.x.shape[0], step):
            part = slice(first, first + step)
            selections = [None if s is None else s.to(device) for s in self.chosen[part]]
            yield first, list(self.x[part].to(device).float()), selections

    def to(self, device: torch.device) -> "States":
        """The same states on a device."""
        return States(self.x.to(device), self.chosen, self.broken)

    def part(self, windows: slice) -> "States":
        """Some of the windows."""
        return States(self.x[windows], self.chosen[windows])

    def joined(self, parts: Sequence["States"]) -> "States":
        """These windows again, of which neighbouring parts, first to last, have advanced in place."""
        firsts = accumulate((len(part.x) for part in parts), initial=0)
        broken = tuple(first + index for first, part in zip(firsts, parts, strict=False) for index in part.broken)
        return States(self.x, tuple(selection for part in parts for selection in part.chosen), broken)

    def only(self, windows: Sequence[int]) -> "States":
        """The windows of these numbers, in rising order; no copy if they are all."""
        if len(windows) == len(self.x):
            return self
        return States(self.x[list(windows)], tuple(self.chosen[number] for number in windows))

    def tensors(self, prefix: str, keep_selection: bool) -> dict[str, Tensor]:
        """Named tensors for the work directory; selections as packed bits, and only if a next layer shares them."""
        tensors = {f"{prefix}.x": on_host(self.x)}
        if keep_selection and self.chosen[0] is not None:
            tensors[f"{prefix}.chosen"] = _pack(self.chosen)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str) -> "States":
        """The inverse of `tensors`."""
        x = tensors[f"{prefix}.x"]
        packed = tensors.get(f"{prefix}.chosen")
        return cls(x, (None,) * x.shape[0] if packed is None else _unpack(packed, x.shape[1]))


def save_states(path: Path, parts: dict[str, States], keep_selection: bool) -> str:
    """Write named groups of states ("fit", "selection") to one file; returns its SHA-256."""
    tensors: dict[str, Tensor] = {}
    for name, states in parts.items():
        tensors |= states.tensors(name, keep_selection)
    return save_tensors(path, tensors)


def read_states(tensors: dict[str, Tensor], names: Sequence[str]) -> dict[str, States]:
    """Named groups of states from a file's tensors."""
    return {name: States.from_tensors(tensors, name) for name in names}


def _broken(states: Sequence[Tensor]) -> list[int]:
    """Which of them hold a value that is not finite: it spoils a sum, and one of float64 cannot overflow."""
    sums = torch.stack([state.sum(dtype=torch.float64) for state in states])
    return torch.nonzero(~sums.isfinite()).flatten().tolist()


def _pack(chosen: Sequence[Tensor | None]) -> Tensor:
    return torch.from_numpy(np.packbits(torch.stack(list(chosen)).cpu().numpy(), axis=-1))


def _unpack(packed: Tensor, width: int) -> tuple[Tensor, ...]:
    bits = np.unpackbits(packed.numpy(), axis=-1, count=width).astype(bool)
    return tuple(torch.from_numpy(bits))
