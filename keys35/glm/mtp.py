"""The multi-token-prediction layer: from the trunk's state at t and token t+1 to logits for token t+2."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keys35.glm.block import LayerWeights, Observer, rms_norm, sum_shares
from keys35.glm.config import GlmConfig
from keys35.glm.layer import decoder_layer


@torch.no_grad()
def mtp_inputs(
    config: GlmConfig,
    weights: LayerWeights,
    hidden: Sequence[Tensor],
    embedded: Sequence[Tensor],
    final_norm: Tensor,
) -> list[Tensor]:
    """What enters the MTP decoder layer: (S-1, d) per window, row t from state t and token t+1.

    hidden: the trunk's last states (S, d), before the model's final norm, whose weight is `final_norm`.
    embedded: embeddings (S, d) of the same windows' tokens. `config.mtp_hidden` decides whether the final
    norm is applied to the states first.
    """
    pairs = zip(hidden, embedded, strict=True)
    return [mtp_rows(config, weights, state[:-1], embedding[1:], final_norm) for state, embedding in pairs]


@torch.no_grad()
def mtp_rows(
    config: GlmConfig, weights: LayerWeights, states: Tensor, following: Tensor, final_norm: Tensor
) -> Tensor:
    """The same for single rows (N, d): the trunk's states and the embeddings of the tokens that follow them."""
    if config.mtp_hidden == "post_norm":
        states = rms_norm(states, final_norm, config.rms_norm_eps)
    # The order of the two halves is part of the checkpoint format: embedding first.
    pair = [
        rms_norm(following, weights.tensor("enorm.weight"), config.rms_norm_eps),
        rms_norm(states, weights.tensor("hnorm.weight"), config.rms_norm_eps),
    ]
    return weights.linear("eh_proj", torch.cat(pair, -1))


def mtp_layer(
    config: GlmConfig,
    layer: int,
    weights: LayerWeights,
    hidden: Sequence[Tensor],
    embedded: Sequence[Tensor],
    final_norm: Tensor,
    *,
    observer: Observer | None = None,
    reduce: Callable[[Tensor], Tensor] = sum_shares,
) -> list[Tensor]:
    """Run one MTP layer over windows; row t of a result (S-1, d) leads to logits for token t+2.

    Arguments as for `mtp_inputs`. The result still wants shared_head.norm and the model's own head.
    """
    windows = mtp_inputs(config, weights, hidden, embedded, final_norm)
    selections = [None] * len(windows)
    states, _ = decoder_layer(config, layer, weights, windows, selections, observer=observer, reduce=reduce)
    return states
