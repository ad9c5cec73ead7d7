"""MLA attention over a DSA selection, for whole sequences and step by step (design note, section 1).

`B` sequences of one length S go together; T is the number of keys that they can look at.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from keys35.glm.block import Block, wide
from keys35.glm.config import GlmConfig

LATENT_EPS = 1e-6  # the q and kv latents and the indexer's key norm do not use rms_norm_eps
QUERY_ROWS = 512  # queries scored at a time: bounds scores to heads x 512 x T


class LayerCache:
    """What decoding keeps of a sequence: kv latents (1, T, r), rotated keys (1, T, dr) and indexer keys (1, T, di)."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @property
    def length(self) -> int:
        """Number of cached positions."""
        return self._kept["latent"].shape[1] if self._kept else 0

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on, say drafts that were refused."""
        self._kept = {name: rows[:, :length] for name, rows in self._kept.items()}

    def extend(self, name: str, rows: Tensor) -> Tensor:
        """Append rows to one of the kept tensors and return all of it."""
        past = self._kept.get(name)
        self._kept[name] = rows if past is None else torch.cat([past, rows], 1)
        return self._kept[name]


def attention(
    block: Block, h: Tensor, selection: Tensor | None, where: Tensor, cache: LayerCache | None
) -> tuple[Tensor, Tensor | None]:
    """Attention of normalised states h (B, S, d): output (B, S, d), and the selection it used, bool (B, S, T).

    With a cache that already holds positions (then B is 1), the rows continue them, in the absorbed form.
    """
    mixed, selection = mixed_values(block, h, query_latent(block, h, where), selection, where, cache)
    return block.reduce(block.partial("self_attn.o_proj", mixed)).unflatten(0, h.shape[:2]), selection


def query_latent(block: Block, h: Tensor, where: Tensor) -> Tensor:
    """The latent (B, S, r) that queries are made of, from normalised states h (B, S, d)."""
    block.seen(["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], h.flatten(0, 1), where)
    latent = block.norm("self_attn.q_a_layernorm", _linear(block, "q_a_proj", h), LATENT_EPS)
    readers = ["self_attn.q_b_proj", "self_attn.indexer.wq_b"]
    block.seen(readers[: 1 + block.config.has_indexer(block.layer)], latent.flatten(0, 1), where)
    return latent


def mixed_values(
    block: Block, h: Tensor, q_latent: Tensor, selection: Tensor | None, where: Tensor, cache: LayerCache | None
) -> tuple[Tensor, Tensor | None]:
    """What enters `o_proj`, (B S, heads dv), and the selection as `attention` returns it."""
    config = block.config
    start = cache.length if cache else 0
    turn = rotation(config, torch.arange(start, start + h.shape[1], device=h.device))
    query = _linear(block, "q_b_proj", q_latent).unflatten(-1, (-1, config.qk_head_dim))
    q_nope, q_rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    q_rope = rotate(q_rope, turn)
    latent, k_rope = _linear(block, "kv_a_proj_with_mqa", h).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
    latent = block.norm("self_attn.kv_a_layernorm", latent, LATENT_EPS)
    k_rope = rotate(k_rope.unsqueeze(2), turn).squeeze(2)

    if config.has_indexer(block.layer):
        selection = _select(block, h, q_latent, turn, start, cache)
    if cache is not None:
        latent, k_rope = cache.extend("latent", latent), cache.extend("k_rope", k_rope)
    kv_b = block.weights.tensor("self_attn.kv_b_proj.weight")
    kv_b = kv_b.unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))
    attend = _attend_absorbed if start else _attend
    mixed = attend(config, q_nope, q_rope, latent, k_rope, kv_b, selection).flatten(0, 1)
    block.seen(["self_attn.o_proj"], mixed, where)
    return mixed, selection


def _linear(block: Block, module: str, x: Tensor) -> Tensor:
    return block.linear(f"self_attn.{module}", x.flatten(0, 1)).unflatten(0, x.shape[:2])


def rotation(config: GlmConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 (S, 1, dr / 2), for positions (S,)."""
    width = config.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, device=positions.device).float() / width
    angle = positions.float()[:, None, None] / config.rope_theta**exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of interleaved pairs of x (B, S, heads, dr); rotated evens come out first, odds second."""
    cos, sin = turn
    even, odd = wide(x[..., 0::2]), wide(x[..., 1::2])
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)


def _select(
    block: Block,
    h: Tensor,
    q_latent: Tensor,
    turn: tuple[Tensor, Tensor],
    start: int,
    cache: LayerCache | None,
) -> Tensor | None:
    """The indexer's choice, bool (B, S, T): index_topk keys per query; None when that is every earlier key."""
    config, weights = block.config, block.weights
    if cache is None and h.shape[1] <= config.index_topk:
        return None
    width, rope = config.index_head_dim, config.qk_rope_head_dim
    key = F.layer_norm(
        F.linear(h, weights.tensor("self_attn.indexer.wk.weight")),
        (width,),
        weights.tensor("self_attn.indexer.k_norm.weight"),
        weights.tensor("self_attn.indexer.k_norm.bias"),
        LATENT_EPS,
    ).unsqueeze(2)
    key = torch.cat([rotate(key[..., :rope], turn), key[..., rope:]], -1).squeeze(2)
    if cache is not None:
        key = cache.extend("index_key", key)
    if key.shape[1] <= config.index_topk:
        return None
    query = _linear(block, "indexer.wq_b", q_latent).unflatten(-1, (config.index_n_heads, width))
    query = wide(torch.cat([rotate(query[..., :rope], turn), query[..., rope:]], -1))
    head_weight = wide(F.linear(h, weights.tensor("self_attn.indexer.weights_proj.weight")))
    head_weight = head_weight * config.index_n_heads**-0.5
    chosen = torch.zeros(*h.shape[:2], key.shape[1], dtype=torch.bool, device=h.device)
    for begin in range(0, h.shape[1], QUERY_ROWS):
        part = slice(begin, begin + QUERY_ROWS)
        score = torch.einsum("bshd,btd->bsht", query[:, part], wide(key) * width**-0.5).relu_()
        score = (head_weight[:, part].unsqueeze(2) @ score).squeeze(2)
        score.masked_fill_(_future(begin + start, *score.shape[1:], h.device), float("-inf"))
        if start:
            chosen[:, part] = _earliest(score, config.index_topk)
        else:
            chosen[:, part].scatter_(2, score.topk(config.index_topk, -1).indices, True)
    return chosen


def _earliest(score: Tensor, count: int) -> Tensor:
    """Bool, as score (.., T): the highest, and of those that tie the earliest.

    Scores tie, at 0 above all, and which ones topk takes depends on the rows beside. Whole windows leave that to it, as
    transformers does; a draft comes in other numbers of rows than a serial reply.
    """
    least = score.topk(count, -1).values[..., -1:]
    above, ties = score > least, score == least
    return above | (ties & (ties.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _future(first: int, rows: int, keys: int, device: torch.device) -> Tensor:
    """Bool (rows, keys): keys later than each query, whose positions start at `first`."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(first + 1)


def _attend(
    config: GlmConfig,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    selection: Tensor | None,
) -> Tensor:
    """Keys and values expanded from the latents; queries are positions 0..S-1. Returns (B, S, heads * dv)."""
    k_nope, value = torch.einsum("btr,hor->bhto", latent, kv_b).split([config.qk_nope_head_dim, config.v_head_dim], -1)
    key = torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, k_nope.shape[1], -1, -1)], -1)
    query = torch.cat([q_nope, q_rope], -1)
    outputs = []
    for begin in range(0, q_nope.shape[1], QUERY_ROWS):
        part, seen = slice(begin, begin + QUERY_ROWS), slice(begin + QUERY_ROWS)  # no later key is anybody's
        score = torch.einsum("bshd,bhtd->bhst", query[:, part], key[:, :, seen])
        share = _softmax(config, score, None if selection is None else selection[:, part, seen], begin)
        outputs.append(torch.einsum("bhst,bhtv->bshv", share.to(value.dtype), value[:, :, seen]))
    return torch.cat(outputs, 1).flatten(2)


def _attend_absorbed(
    config: GlmConfig,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    selection: Tensor | None,
) -> Tensor:
    """The same product with kv_b folded into query and output, for a few rows at the end of a long past."""
    fold_key, fold_value = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    query = torch.einsum("bshd,hdr->bshr", q_nope, fold_key)
    score = torch.einsum("bshr,btr->bhst", query, latent) + torch.einsum("bshd,btd->bhst", q_rope, k_rope)
    share = _softmax(config, score, selection, latent.shape[1] - q_nope.shape[1])
    mixed = torch.einsum("bhst,btr->bshr", share.to(latent.dtype), latent)
    return torch.einsum("bshr,hvr->bshv", mixed, fold_value).flatten(2)


def _softmax(config: GlmConfig, score: Tensor, selection: Tensor | None, first: int) -> Tensor:
    """Causal softmax in float32 over the selected keys; score (B, heads, rows, T), queries from `first` on."""
    hidden = _future(first, *score.shape[2:], score.device)
    if selection is not None:
        hidden = (hidden | ~selection).unsqueeze(1)
    score = wide(score).mul_(config.qk_head_dim**-0.5)  # in place: the largest tensor here is nobody else's
    return score.masked_fill_(hidden, float("-inf")).softmax(-1)
