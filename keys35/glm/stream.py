"""A whole forward pass with one layer in memory at a time."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from keys35.glm.block import Observer, rms_norm, sum_shares
from keys35.glm.layer import decoder_layer
from keys35.glm.mtp import mtp_layer
from keys35.glm.names import EMBEDDING, FINAL_NORM, HEAD
from keys35.glm.weights import WeightStore


def embed(store: WeightStore, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Embeddings (S, d) of windows of token ids (S,); the table is read once and dropped."""
    table = store.tensor(EMBEDDING)
    return [table[window.to(table.device)] for window in tokens]


def trunk(
    store: WeightStore,
    windows: Sequence[Tensor],
    *,
    observer: Observer | None = None,
    reduce: Callable[[Tensor], Tensor] = sum_shares,
) -> list[Tensor]:
    """Carry embedded windows (S, d) through all decoder layers; the result is before the final norm."""
    config, states = store.config, list(windows)
    selections: list[Tensor | None] = [None] * len(states)
    for layer in range(config.num_hidden_layers):
        states, selections = decoder_layer(
            config, layer, store.layer(layer), states, selections, observer=observer, reduce=reduce
        )
    return states


def mtp(
    store: WeightStore,
    hidden: Sequence[Tensor],
    embedded: Sequence[Tensor],
    *,
    observer: Observer | None = None,
    reduce: Callable[[Tensor], Tensor] = sum_shares,
) -> list[Tensor]:
    """Run the first MTP layer after `trunk`; see `mtp_layer`. Asserts that the model has one."""
    config = store.config
    assert config.num_nextn_predict_layers, "the model has no MTP layer"
    layer = config.num_hidden_layers
    final_norm = store.tensor(FINAL_NORM)
    return mtp_layer(config, layer, store.layer(layer), hidden, embedded, final_norm, observer=observer, reduce=reduce)


class Head:
    """Final norm and vocabulary projection in float32; under TP, this rank's rows of the vocabulary."""

    def __init__(self, norm: Tensor, weight: Tensor, eps: float) -> None:
        self.norm, self.weight, self.eps = norm.float(), weight.float(), eps

    @classmethod
    def of_trunk(cls, store: WeightStore) -> "Head":
        return cls(store.tensor(FINAL_NORM), store.tensor(HEAD), store.config.rms_norm_eps)

    def for_mtp(self, store: WeightStore) -> "Head":
        """The same projection behind the MTP layer's own norm."""
        norm = store.tensor(f"model.layers.{store.config.num_hidden_layers}.shared_head.norm.weight")
        return Head(norm, self.weight, self.eps)

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (rows, vocabulary) of states (rows, d); keep the number of rows small."""
        states = hidden.to(self.weight.device, torch.float32)
        return F.linear(rms_norm(states, self.norm, self.eps), self.weight)
