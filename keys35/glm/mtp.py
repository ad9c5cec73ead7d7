"""The multi-token-prediction layer: from the trunk's state at t and token t+1 to logits for token t+2."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keys35.glm.block import LayerWeights, Observer, identity, rms_norm
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
    windows = []
    for state, embedding in zip(hidden, embedded, strict=True):
        state = state[:-1]
        if config.mtp_hidden == "post_norm":
            state = rms_norm(state, final_norm, config.rms_norm_eps)
        # The order of the two halves is part of the checkpoint format: embedding first.
        pair = [
            rms_norm(embedding[1:], weights.tensor("enorm.weight"), config.rms_norm_eps),
            rms_norm(state, weights.tensor("hnorm.weight"), config.rms_norm_eps),
        ]
        windows.append(weights.linear("eh_proj", torch.cat(pair, -1)))
    return windows


def mtp_layer(
    config: GlmConfig,
    layer: int,
    weights: LayerWeights,
    hidden: Sequence[Tensor],
    embedded: Sequence[Tensor],
    final_norm: Tensor,
    *,
    observer: Observer | None = None,
    reduce: Callable[[Tensor], Tensor] = identity,
) -> list[Tensor]:
    """Run one MTP layer over windows; row t of a result (S-1, d) leads to logits for token t+2.

    Arguments as for `mtp_inputs`. The result still wants shared_head.norm and the model's own head.
    """
    windows = mtp_inputs(config, weights, hidden, embedded, final_norm)
    selections = [None] * len(windows)
    states, _ = decoder_layer(config, layer, weights, windows, selections, observer=observer, reduce=reduce)
    return states
