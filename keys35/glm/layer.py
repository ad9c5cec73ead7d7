"""One decoder layer of glm_moe_dsa over whole sequences (design note glm-moe-dsa, section 1).

The weights come from outside, so the same arithmetic serves a BF16 source, an EXL3 checkpoint and one rank's
slice of it. `N` is a number of rows (tokens), `S` the rows of one sequence, `T` the keys it can look at.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from keys35.glm.attention import QUERY_ROWS, LayerCache, attention, mixed_values, query_latent
from keys35.glm.block import Block, LayerWeights, Observer, sum_shares, wide
from keys35.glm.config import GlmConfig
from keys35.precision import whole_products

Linear = Callable[[Tensor], Tensor]

SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Attention scores made at a time where windows are short: what a processor's cache holds, what keeps a GPU busy."""


@torch.no_grad()
def decoder_layer(
    config: GlmConfig,
    layer: int,
    weights: LayerWeights,
    windows: Sequence[Tensor],
    selections: Sequence[Tensor | None],
    *,
    observer: Observer | None = None,
    caches: Sequence[LayerCache] | None = None,
    reduce: Callable[[Tensor], Tensor] = sum_shares,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Run one layer over several sequences and return their new states and sparse selections.

    windows: states (S, d), lengths may differ. selections: per window the previous layer's DSA selection,
    bool (S, T), or None for "every earlier key". caches: one per window when decoding step by step. reduce:
    sums the ranks' shares of an output, called once per run of windows for attention and once for the MLP. Attention
    takes a few windows of one length at a time, the MLP all rows at once, so each expert's weights are asked for only
    once.
    """
    block = Block(config, layer, weights, observer or Observer(), reduce)
    states, chosen, places = _attended(block, windows, selections, caches)
    return _fed(block, states, places), chosen


@torch.no_grad()
def behind_attention(
    config: GlmConfig,
    layer: int,
    weights: LayerWeights,
    windows: Sequence[Tensor],
    selections: Sequence[Tensor | None],
    *,
    observer: Observer | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The first half of a layer: the states (S, d) that its MLP is added to, and the selections."""
    block = Block(config, layer, weights, observer or Observer(), sum_shares)
    states, chosen, _ = _attended(block, windows, selections, None)
    return states, chosen


@torch.no_grad()
def behind_mlp(
    config: GlmConfig,
    layer: int,
    weights: LayerWeights,
    windows: Sequence[Tensor],
    selections: Sequence[Tensor | None],
    *,
    observer: Observer | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The other half: the layer's states, from those (S, d) behind its attention; the selections are passed on."""
    block = Block(config, layer, weights, observer or Observer(), sum_shares)
    places = [_places(range(index, index + 1), 0, len(x)) for index, x in enumerate(windows)]
    return _fed(block, list(windows), places), list(selections)


@torch.no_grad()
def show_attention(
    config: GlmConfig,
    layer: int,
    weights: LayerWeights,
    windows: Sequence[Tensor],
    selections: Sequence[Tensor | None],
    *,
    observer: Observer,
    mixed: bool,
) -> None:
    """Let an observer see what enters attention's linears; mixed: `o_proj`, too, which takes far longer."""
    block = Block(config, layer, weights, observer, sum_shares)
    for run, x, selection in _stacked(config, windows, selections, alone=False):
        h, where = block.norm("input_layernorm", x), _places(run, 0, x.shape[1])
        latent = query_latent(block, h, where)
        if mixed:
            mixed_values(block, h, latent, selection, where, None)


@torch.no_grad()
def mlp_inputs(config: GlmConfig, layer: int, weights: LayerWeights, states: Tensor) -> Tensor:
    """What a layer's MLP or router is given (N, d), from the states behind its attention."""
    return Block(config, layer, weights, Observer(), sum_shares).norm("post_attention_layernorm", states)


@torch.no_grad()
def routed_outputs(config: GlmConfig, layer: int, weights: LayerWeights, rows: Tensor) -> Tensor:
    """What a layer's routed experts make of its MLP's inputs (N, d), float32 (N, d)."""
    block = Block(config, layer, weights, Observer(), sum_shares)
    return sum_shares(_routed_experts(block, rows, *route(config, weights, rows)))


def _attended(
    block: Block,
    windows: Sequence[Tensor],
    selections: Sequence[Tensor | None],
    caches: Sequence[LayerCache] | None,
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """States behind attention (S, d), selections and places of each window."""
    states, chosen, places = [], [], []
    for run, x, selection in _stacked(block.config, windows, selections, alone=caches is not None):
        cache = caches[run.start] if caches else None
        where = _places(run, cache.length if cache else 0, x.shape[1])
        mixed, selection = attention(block, block.norm("input_layernorm", x), selection, where, cache)
        states += (x + mixed.to(x.dtype)).unbind()
        chosen += [None] * len(run) if selection is None else selection.unbind()
        places.append(where)
    return states, chosen, places


def _fed(block: Block, states: list[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
    """States (S, d) behind the MLP, from those behind attention, which the list loses."""
    lengths, rows = [len(x) for x in states], torch.cat(states)
    states.clear()  # their rows are the most of what a pass needs beside the weights
    h = block.norm("post_attention_layernorm", rows)
    rows += feed_forward(block, h, torch.cat(list(places))).to(rows.dtype)
    return list(rows.split(lengths))


def _stacked(
    config: GlmConfig, windows: Sequence[Tensor], selections: Sequence[Tensor | None], alone: bool
) -> Iterator[tuple[range, Tensor, Tensor | None]]:
    """Windows that attention takes together: their numbers, states (B, S, d) and selections, bool (B, S, T)."""
    for run in _runs(config, windows, selections, alone):
        part = slice(run.start, run.stop)
        shared = selections[run.start]
        yield run, torch.stack(windows[part]), None if shared is None else torch.stack(selections[part])


def _runs(
    config: GlmConfig, windows: Sequence[Tensor], selections: Sequence[Tensor | None], alone: bool
) -> Iterator[range]:
    """Neighbouring windows that attention takes together: alike, and few enough for `SCORES`; or each alone."""
    start = 0
    while start < len(windows):
        x, chosen, stop = windows[start], selections[start] is None, start + 1
        one = config.num_attention_heads * min(len(x), QUERY_ROWS) * len(x)
        last = start + (1 if alone else max(1, SCORES[x.device.type] // one))
        while stop < min(last, len(windows)) and len(windows[stop]) == len(x) and chosen is (selections[stop] is None):
            stop += 1
        yield range(start, stop)
        start = stop


def _places(sequences: range, start: int, count: int) -> Tensor:
    return torch.cartesian_prod(torch.arange(sequences.start, sequences.stop), torch.arange(start, start + count))


def gated_mlp(x: Tensor, gate: Linear, up: Linear, down: Linear) -> Tensor:
    """down(silu(gate(x)) * up(x)): a dense MLP, a shared expert or one routed expert, x (N, d)."""
    return down(F.silu(gate(x)) * up(x))


def mlp_linears(weights: LayerWeights, prefix: str) -> tuple[Linear, Linear, Linear]:
    """Gate, up and down of an MLP that is named like "mlp.shared_experts"."""
    gate, up, down = (partial(weights.linear, f"{prefix}.{leaf}_proj") for leaf in ("gate", "up", "down"))
    return gate, up, down


def route(config: GlmConfig, weights: LayerWeights, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row: ids int64 (N, k) and float32 weights (N, k).

    The correction bias decides who is chosen and never touches the weights; all of it is float32, because in
    BF16 the bias collapses to a handful of values.
    """
    with whole_products():
        scores = F.linear(wide(rows), weights.tensor("mlp.gate.weight").to(wide(rows).dtype)).sigmoid()
    bias = weights.tensor("mlp.gate.e_score_correction_bias").float()
    ids = (scores + bias).topk(config.num_experts_per_tok, dim=-1).indices
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def feed_forward(block: Block, rows: Tensor, where: Tensor) -> Tensor:
    """The dense MLP, or routed experts plus shared expert, of normalised rows (N, d); float32 (N, d)."""
    if not block.config.is_moe(block.layer):
        return block.reduce(_watched_mlp(block, "mlp", rows, where))
    ids, weights = route(block.config, block.weights, rows)
    routed = _routed_experts(block, rows, ids, weights)
    block.observer.moe(block.layer, rows, ids, weights, sum_shares(routed), where)
    output = _watched_mlp(block, "mlp.shared_experts", rows, where)
    output += routed  # the observer may keep the other one
    return block.reduce(output)


def _watched_mlp(block: Block, prefix: str, rows: Tensor, where: Tensor) -> Tensor:
    """This rank's shares, (shares, N, d), of an MLP that every row passes."""
    gate, up, down = (f"{prefix}.{leaf}_proj" for leaf in ("gate", "up", "down"))

    def watched_down(hidden: Tensor) -> Tensor:
        block.seen([down], hidden, where)
        return block.partial(down, hidden)

    block.seen([gate, up], rows, where)
    return gated_mlp(rows, lambda x: block.linear(gate, x), lambda x: block.linear(up, x), watched_down)


def _routed_experts(block: Block, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Shares (shares, N, d) of the sum of weight * expert output, in float32.

    Experts are added in ascending order, so that sums repeat exactly.
    """
    if (routed := block.weights.experts(rows, ids, weights)) is not None:
        return routed
    total: Tensor | None = None
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up, down = (f"mlp.experts.{expert}.{leaf}_proj" for leaf in ("gate", "up", "down"))
        output = gated_mlp(
            rows[token],
            lambda x, module=gate: block.linear(module, x),
            lambda x, module=up: block.linear(module, x),
            lambda x, module=down: block.partial(module, x),
        )
        if total is None:
            total = output.new_zeros(len(output), *rows.shape)
        total[:, token] += output * weights[token, slot, None]
    assert total is not None, "rows choose at least one expert"
    return total
