"""Greedy generation with a cache of latents, on one rank or several."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keys35.glm.attention import LayerCache
from keys35.glm.layer import decoder_layer
from keys35.glm.names import EMBEDDING, total_params
from keys35.glm.stream import Head
from keys35.glm.weights import Keep, WeightStore
from keys35.runtime.ranks import Ranks

DECODED_BYTES = 2 << 30


class Decoder:
    """A whole model held in memory, one sequence at a time.

    Without `keep`, small models are held decoded (ALL) and large ones as EXL3 parts that are decoded at each
    use (PACKED), which is slow but fits where the checkpoint is meant to fit.
    """

    def __init__(self, store: WeightStore, ranks: Ranks, keep: Keep | None = None) -> None:
        self.config, self.ranks = store.config, ranks
        if keep is None:
            decoded = total_params(store.rules) * store.dtype.itemsize // store.tp
            keep = Keep.ALL if decoded < DECODED_BYTES else Keep.PACKED
        self.embedding = store.tensor(EMBEDDING)
        self.head = Head.of_trunk(store)
        self.layers = [store.layer(layer, keep) for layer in range(self.config.num_hidden_layers)]
        for layer in self.layers:
            layer.load()

    def caches(self) -> list[LayerCache]:
        """Empty caches for a new sequence."""
        return [LayerCache() for _ in self.layers]

    def advance(self, tokens: Sequence[int], caches: Sequence[LayerCache]) -> Tensor:
        """Append tokens to the cached sequence; this rank's logits (n, vocabulary share) for what follows."""
        rows = self.embedding[torch.tensor(tokens, device=self.embedding.device)]
        windows, selections = [rows], [None]
        for index, (weights, cache) in enumerate(zip(self.layers, caches, strict=True)):
            windows, selections = decoder_layer(
                self.config, index, weights, windows, selections, caches=[cache], reduce=self.ranks.reduce
            )
        return self.head(windows[0])


def generate(decoder: Decoder, prompt: Sequence[int], count: int) -> Iterator[int]:
    """Up to `count` greedy tokens after a prompt; ends before an end-of-sequence token of the config."""
    caches = decoder.caches()
    tokens = list(prompt)
    for _ in range(count):
        logits = decoder.advance(tokens, caches)
        token = int(decoder.ranks.greedy(logits[-1:])[0])
        if token in decoder.config.eos_token_ids:
            return
        yield token
        tokens = [token]
