"""MLA attention over a DSA selection, for whole sequences and step by step (design note, section 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from keys35.glm.block import Block, wide
from keys35.glm.config import GlmConfig

LATENT_EPS = 1e-6  # the q and kv latents and the indexer's key norm do not use rms_norm_eps
QUERY_ROWS = 512  # queries scored at a time: bounds scores to heads x 512 x T


class LayerCache:
    """What decoding keeps of the past: kv latents (T, r), rotated keys (T, dr) and indexer keys (T, di)."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @property
    def length(self) -> int:
        """Number of cached positions."""
        return len(self._kept["latent"]) if self._kept else 0

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on, say drafts that were refused."""
        self._kept = {name: rows[:length] for name, rows in self._kept.items()}

    def extend(self, name: str, rows: Tensor) -> Tensor:
        """Append rows to one of the kept tensors and return all of it."""
        past = self._kept.get(name)
        self._kept[name] = rows if past is None else torch.cat([past, rows])
        return self._kept[name]


def attention(
    block: Block, h: Tensor, selection: Tensor | None, where: Tensor, cache: LayerCache | None
) -> tuple[Tensor, Tensor | None]:
    """Attention of one sequence's normalised rows h (S, d): output (S, d), and the selection it used.

    With a cache that already holds positions, the rows continue them, in the absorbed form.
    """
    config = block.config
    start = cache.length if cache else 0
    turn = rotation(config, torch.arange(start, start + len(h), device=h.device))
    block.seen(["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], h, where)
    q_latent = block.norm("self_attn.q_a_layernorm", block.linear("self_attn.q_a_proj", h), LATENT_EPS)
    readers = ["self_attn.q_b_proj", "self_attn.indexer.wq_b"]
    block.seen(readers[: 1 + config.has_indexer(block.layer)], q_latent, where)

    query = block.linear("self_attn.q_b_proj", q_latent).unflatten(-1, (-1, config.qk_head_dim))
    q_nope, q_rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    q_rope = rotate(q_rope, turn)
    latent, k_rope = block.linear("self_attn.kv_a_proj_with_mqa", h).split(
        [config.kv_lora_rank, config.qk_rope_head_dim], -1
    )
    latent = block.norm("self_attn.kv_a_layernorm", latent, LATENT_EPS)
    k_rope = rotate(k_rope.unsqueeze(1), turn).squeeze(1)

    if config.has_indexer(block.layer):
        selection = _select(block, h, q_latent, turn, start, cache)
    if cache is not None:
        latent, k_rope = cache.extend("latent", latent), cache.extend("k_rope", k_rope)
    kv_b = block.weights.tensor("self_attn.kv_b_proj.weight")
    kv_b = kv_b.unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))
    attend = _attend_absorbed if start else _attend
    mixed = attend(config, q_nope, q_rope, latent, k_rope, kv_b, selection)
    block.seen(["self_attn.o_proj"], mixed, where)
    return block.reduce(block.partial("self_attn.o_proj", mixed)), selection


def rotation(config: GlmConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 (S, 1, dr / 2), for positions (S,)."""
    width = config.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, device=positions.device).float() / width
    angle = positions.float()[:, None, None] / config.rope_theta**exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of interleaved pairs of x (S, heads, dr); rotated evens come out first, odds second."""
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
    """The indexer's choice, bool (S, T): index_topk keys per query; None when that is every earlier key."""
    config, weights = block.config, block.weights
    if cache is None and len(h) <= config.index_topk:
        return None
    width, rope = config.index_head_dim, config.qk_rope_head_dim
    key = F.layer_norm(
        F.linear(h, weights.tensor("self_attn.indexer.wk.weight")),
        (width,),
        weights.tensor("self_attn.indexer.k_norm.weight"),
        weights.tensor("self_attn.indexer.k_norm.bias"),
        LATENT_EPS,
    ).unsqueeze(1)
    key = torch.cat([rotate(key[..., :rope], turn), key[..., rope:]], -1).squeeze(1)
    if cache is not None:
        key = cache.extend("index_key", key)
    if len(key) <= config.index_topk:
        return None
    query = block.linear("self_attn.indexer.wq_b", q_latent).unflatten(-1, (config.index_n_heads, width))
    query = wide(torch.cat([rotate(query[..., :rope], turn), query[..., rope:]], -1))
    head_weight = wide(F.linear(h, weights.tensor("self_attn.indexer.weights_proj.weight")))
    head_weight = head_weight * config.index_n_heads**-0.5
    chosen = torch.zeros(len(h), len(key), dtype=torch.bool, device=h.device)
    for begin in range(0, len(h), QUERY_ROWS):
        part = slice(begin, begin + QUERY_ROWS)
        score = (query[part] @ wide(key).T * width**-0.5).relu_()  # (rows, heads, T)
        score = (head_weight[part].unsqueeze(1) @ score).squeeze(1)
        score.masked_fill_(_future(begin + start, *score.shape, h.device), float("-inf"))
        chosen[part].scatter_(1, score.topk(config.index_topk, -1).indices, True)
    return chosen


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
    """Keys and values expanded from the latents; queries are positions 0..S-1. Returns (S, heads * dv)."""
    k_nope, value = torch.einsum("tr,hor->hto", latent, kv_b).split([config.qk_nope_head_dim, config.v_head_dim], -1)
    outputs = []
    for begin in range(0, len(q_nope), QUERY_ROWS):
        part = slice(begin, begin + QUERY_ROWS)
        score = torch.einsum("shd,htd->hst", q_nope[part], k_nope)
        score = score + torch.einsum("shd,td->hst", q_rope[part], k_rope)
        share = _softmax(config, score, None if selection is None else selection[part], begin)
        outputs.append(torch.einsum("hst,htv->shv", share.to(value.dtype), value))
    return torch.cat(outputs).flatten(1)


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
    query = torch.einsum("shd,hdr->shr", q_nope, fold_key)
    score = torch.einsum("shr,tr->hst", query, latent) + torch.einsum("shd,td->hst", q_rope, k_rope)
    share = _softmax(config, score, selection, len(latent) - len(q_nope))
    mixed = torch.einsum("hst,tr->shr", share.to(latent.dtype), latent)
    return torch.einsum("shr,hvr->shv", mixed, fold_value).flatten(1)


def _softmax(config: GlmConfig, score: Tensor, selection: Tensor | None, first: int) -> Tensor:
    """Causal softmax in float32 over the selected keys; score (heads, rows, T), queries from `first` on."""
    hidden = _future(first, *score.shape[1:], score.device)
    if selection is not None:
        hidden = hidden | ~selection
    score = wide(score) * config.qk_head_dim**-0.5
    return score.masked_fill(hidden, float("-inf")).softmax(-1)
