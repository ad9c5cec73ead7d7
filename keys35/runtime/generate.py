"""Greedy generation with a cache of latents, on one rank or several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keys35.glm.attention import LayerCache
from keys35.glm.layer import decoder_layer
from keys35.glm.mtp import mtp_rows
from keys35.glm.names import EMBEDDING, FINAL_NORM, total_params
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
        self.keep = keep
        self.embedding = store.tensor(EMBEDDING)
        self.head = Head.of_trunk(store)
        self.layers = [store.layer(layer, keep) for layer in range(self.config.num_hidden_layers)]
        for layer in self.layers:
            layer.load()

    def caches(self) -> list[LayerCache]:
        """Empty caches for a new sequence."""
        return [LayerCache() for _ in self.layers]

    def states(self, tokens: Sequence[int], caches: Sequence[LayerCache]) -> Tensor:
        """Append tokens to the cached sequence; their final states (n, d), before the final norm."""
        windows, selections = [self.embed(tokens)], [None]
        for index, (weights, cache) in enumerate(zip(self.layers, caches, strict=True)):
            windows, selections = decoder_layer(
                self.config, index, weights, windows, selections, caches=[cache], reduce=self.ranks.reduce
            )
        return windows[0]

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.embedding[torch.tensor(tokens, device=self.embedding.device)]

    def greedy(self, states: Tensor) -> list[int]:
        """The best next token after each state."""
        return self.ranks.greedy(self.head(states)).tolist()


class Drafter:
    """The MTP layer of a decoder's model, with a cache of its own: drafts the token after the next."""

    def __init__(self, store: WeightStore, decoder: Decoder) -> None:
        self.decoder, self.layer = decoder, store.config.num_hidden_layers
        self.weights = store.layer(self.layer, decoder.keep)
        self.weights.load()
        self.head, self.final_norm = decoder.head.for_mtp(store), store.tensor(FINAL_NORM)
        self.cache = LayerCache()

    def draft(self, states: Tensor, following: Sequence[int]) -> int:
        """Append verified rows, the trunk's states (n, d) and the tokens that follow them; draft one more token."""
        config, decoder = self.decoder.config, self.decoder
        rows = mtp_rows(config, self.weights, states, decoder.embed(following), self.final_norm)
        windows, _ = decoder_layer(
            config, self.layer, self.weights, [rows], [None], caches=[self.cache], reduce=decoder.ranks.reduce
        )
        return int(decoder.ranks.greedy(self.head(windows[0][-1:]))[0])


def generate(decoder: Decoder, prompt: Sequence[int], count: int) -> Iterator[int]:
    """Up to `count` greedy tokens after a prompt; ends before an end-of-sequence token of the config."""
    caches = decoder.caches()
    tokens = list(prompt)
    for _ in range(count):
        [token] = decoder.greedy(decoder.states(tokens, caches)[-1:])
        if token in decoder.config.eos_token_ids:
            return
        yield token
        tokens = [token]


@dataclass
class Drafting:
    """How often drafts were right."""

    drafts: int = 0
    accepted: int = 0


def generate_drafted(
    decoder: Decoder, drafter: Drafter, prompt: Sequence[int], count: int, drafting: Drafting
) -> Iterator[int]:
    """The tokens of `generate`, with a draft of the MTP layer beside each: if the trunk would have said it too, the
    same pass has also made the token after it.
    """
    caches = decoder.caches()
    states, following = decoder.states(prompt, caches), list(prompt[1:])
    chosen = decoder.greedy(states[-1:])
    for left in reversed(range(count)):
        if chosen[0] in decoder.config.eos_token_ids:
            return
        yield chosen[0]
        if not left:  # nobody asks for what a draft would bring
            return
        if len(chosen) == 1:  # nothing known beyond: draft from all rows verified since the last draft, and verify
            draft = drafter.draft(states, [*following, chosen[0]])
            verified = decoder.states([chosen[0], draft], caches)
            next_token, after = decoder.greedy(verified)
            drafting.drafts += 1
            accepted = next_token == draft
            drafting.accepted += accepted
            if accepted:
                states, following, chosen = verified, [draft], [next_token, after]
            else:
                for cache in caches:
                    cache.truncate(cache.length - 1)
                states, following, chosen = verified[:1], [], [next_token]
        else:
            chosen = chosen[1:]
