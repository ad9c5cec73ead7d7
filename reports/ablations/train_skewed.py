"""Train the ablations' second model, a small glm_moe_dsa checkpoint with skewed routing, on one GPU.

    python train_skewed.py TOKENS.npy TOKENIZER.json SECONDS OUT_DIR

TOKENS is a uint16 array (see prepare_text.py). 16 routed experts, 4 a token, width 512; three MoE layers of four; one
MTP layer that reads the state before the final norm. The router's correction bias only rescues an expert that gets
under a fifth of the mean load, so routing stays skewed.
DSA indexers are distilled from the attention, and the last 40 % of the time runs with sparse selection on. Every
dimension is a multiple of 128 after a split by four (kv_a: 160, padded to 256).
"""

import json
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

VOCAB, HIDDEN, DENSE, EXPERT = 2048, 128, 512, 512
LAYERS, FIRST_DENSE, EXPERTS, TOP = 4, 1, 16, 4
HEADS, NOPE, ROPE, VALUE, Q_RANK, KV_RANK = 8, 32, 32, 64, 128, 128
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 4, 64, 128
INDEXERS = ["full", "full", "shared", "full"]
SCALE, EPS, THETA = 2.5, 1e-5, 1e6
SEQUENCE, BATCH = 512, 64
RESCUE, RATE = 0.2, 1e-3  # an expert below RESCUE of the mean load gets its bias raised by RATE a step
SHARD_BYTES = 13 * 2**20


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * self.weight).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=0.02)
    return made


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Indexer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq_b, self.wk = linear(Q_RANK, INDEX_HEADS * INDEX_DIM), linear(HIDDEN, INDEX_DIM)
        self.k_norm, self.weights_proj = nn.LayerNorm(INDEX_DIM, eps=1e-6), linear(HIDDEN, INDEX_HEADS)

    def forward(self, h: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.wq_b(q).unflatten(-1, (INDEX_HEADS, INDEX_DIM))
        k = self.k_norm(self.wk(h).float()).to(h.dtype).unsqueeze(2)
        c, s = cos[None, :, None], sin[None, :, None]
        q = torch.cat([rope(q[..., :ROPE], c, s), q[..., ROPE:]], -1)
        k = torch.cat([rope(k[..., :ROPE], c, s), k[..., ROPE:]], -1).squeeze(2)
        scores = F.relu(torch.einsum("bshd,btd->bsht", q.float(), k.float()) * INDEX_DIM**-0.5)
        return torch.einsum("bsh,bsht->bst", self.weights_proj(h).float() * INDEX_HEADS**-0.5, scores)


class Attention(nn.Module):
    def __init__(self, full: bool):
        super().__init__()
        self.q_a_proj, self.q_a_layernorm = linear(HIDDEN, Q_RANK), Norm(Q_RANK)
        self.q_b_proj = linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(HIDDEN, KV_RANK + ROPE), Norm(KV_RANK)
        self.kv_b_proj, self.o_proj = linear(KV_RANK, HEADS * (NOPE + VALUE)), linear(HEADS * VALUE, HIDDEN)
        self.indexer = Indexer() if full else None

    def forward(self, h: Tensor, place: tuple[Tensor, Tensor, Tensor], masked: Tensor | None, sparse: bool):
        cos, sin, causal = place
        batch, length, _ = h.shape
        qa = self.q_a_layernorm(self.q_a_proj(h))
        q = self.q_b_proj(qa).view(batch, length, HEADS, NOPE + ROPE).transpose(1, 2)
        latent = self.kv_a_proj_with_mqa(h)
        kr = rope(latent[..., KV_RANK:].view(batch, 1, length, ROPE), cos[None, None], sin[None, None]).to(q.dtype)
        q = torch.cat([q[..., :NOPE], rope(q[..., NOPE:], cos[None, None], sin[None, None]).to(q.dtype)], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent[..., :KV_RANK]))
        kv = kv.view(batch, length, HEADS, NOPE + VALUE).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], kr.expand(-1, HEADS, -1, -1)], -1)
        scores = (q @ k.transpose(2, 3)).float() * (NOPE + ROPE) ** -0.5 + causal
        index = None
        if self.indexer is not None:
            index = self.indexer(h.detach(), qa.detach(), cos, sin) + causal
            masked = None
            if sparse:
                kth = index.detach().topk(min(INDEX_TOPK, length), -1).values[..., -1:]
                masked = index.detach() < kth
        if sparse and masked is not None:
            scores = scores.masked_fill(masked[:, None], float("-inf"))
        p = scores.softmax(-1)
        distil = torch.zeros((), device=h.device)
        if index is not None:
            target = p.detach().mean(1)
            distil = (target * (torch.log(target + 1e-9) - index.log_softmax(-1).clamp(min=-40))).sum(-1).mean()
        mixed = (p.to(kv.dtype) @ kv[..., NOPE:]).transpose(1, 2).reshape(batch, length, HEADS * VALUE)
        return self.o_proj(mixed), masked, distil


class Mlp(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(HIDDEN, inner), linear(HIDDEN, inner), linear(inner, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """All experts over all tokens (cheap at this size), weighted by a sparse router."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Parameter(torch.randn(EXPERTS, HIDDEN, EXPERT) * 0.02)
        self.ups = nn.Parameter(torch.randn(EXPERTS, HIDDEN, EXPERT) * 0.02)
        self.downs = nn.Parameter(torch.randn(EXPERTS, EXPERT, HIDDEN) * 0.02)
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.02)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.shared_experts = Mlp(EXPERT)
        self.load = torch.zeros(EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(flat.float() @ self.router.t())
        ids = (scores + self.bias).topk(TOP, -1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * SCALE
        mix = torch.zeros_like(scores).scatter(1, ids, weights)
        self.load = (mix > 0).float().mean(0).detach()
        low = flat.to(torch.bfloat16)[None].expand(EXPERTS, -1, -1)
        inner = F.silu(torch.bmm(low, self.gates.to(torch.bfloat16))) * torch.bmm(low, self.ups.to(torch.bfloat16))
        inner = inner * mix.t()[..., None].to(inner.dtype)
        return torch.bmm(inner, self.downs.to(torch.bfloat16)).sum(0).view(x.shape) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, full: bool, moe: bool):
        super().__init__()
        self.self_attn, self.mlp = Attention(full), Moe() if moe else Mlp(DENSE)
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)

    def forward(self, x: Tensor, place: tuple[Tensor, Tensor, Tensor], masked: Tensor | None, sparse: bool):
        mixed, masked, distil = self.self_attn(self.input_layernorm(x), place, masked, sparse)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), masked, distil


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(kind == "full", i >= FIRST_DENSE) for i, kind in enumerate(INDEXERS))
        self.norm, self.head = Norm(HIDDEN), linear(HIDDEN, VOCAB)
        self.mtp, self.enorm, self.hnorm = Layer(True, True), Norm(HIDDEN), Norm(HIDDEN)
        self.eh, self.mtp_norm = linear(2 * HIDDEN, HIDDEN), Norm(HIDDEN)

    def forward(self, ids: Tensor, sparse: bool):
        position = torch.arange(ids.shape[1], device=ids.device).float()
        frequency = THETA ** -(torch.arange(0, ROPE, 2, device=ids.device).float() / ROPE)
        angle = position[:, None] * frequency
        causal = torch.full((len(position), len(position)), float("-inf"), device=ids.device).triu(1)
        place = (angle.cos(), angle.sin(), causal)
        x, masked, distil = self.embed(ids), None, 0.0
        for layer in self.layers:
            x, masked, part = layer(x, place, masked, sparse)
            distil = distil + part
        logits = self.head(self.norm(x))
        joined = self.eh(torch.cat([self.enorm(self.embed(torch.roll(ids, -1, 1))), self.hnorm(x)], -1))
        joined, _, part = self.mtp(joined, place, None, sparse)
        return logits, self.head(self.mtp_norm(joined)), distil + part


def cross_entropy(logits: Tensor, ids: Tensor, ahead: int) -> Tensor:
    return F.cross_entropy(logits[:, :-ahead].float().flatten(0, 1), ids[:, ahead:].flatten())


def train(tokens: Tensor, seconds: float, device: str) -> Model:
    """`seconds` of AdamW on random windows."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = Model().to(device)
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    step = torch.compile(model) if device == "cuda" else model
    moes = [layer.mlp for layer in [*model.layers, model.mtp] if isinstance(layer.mlp, Moe)]
    tokens, offsets = tokens.to(device), torch.arange(SEQUENCE, device=device)
    begun, told, count = time.time(), 0.0, 0
    while (share := (time.time() - begun) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, count / 200) * (0.475 * (1 + math.cos(math.pi * share)) + 0.05)
        first = torch.randint(0, len(tokens) - SEQUENCE - 1, (BATCH,), device=device)
        ids = tokens[first[:, None] + offsets].long()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits, ahead, distil = step(ids, share > 0.6)
        loss, second = cross_entropy(logits, ids, 1), cross_entropy(ahead, ids, 2)
        (loss + 0.3 * second + 0.1 * distil).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for moe in moes:
            moe.bias += RATE * (moe.load < RESCUE * TOP / EXPERTS)
        count += 1
        if time.time() - told > 15:
            told = time.time()
            loads = " ".join(f"{m.load.min() * EXPERTS / TOP:.2f}-{m.load.max() * EXPERTS / TOP:.2f}" for m in moes)
            print(f"{told - begun:.0f}s step {count} loss {loss:.3f} mtp {second:.3f} distil {distil:.3f} load {loads}",
                  flush=True)
    return model


def stored(model: Model) -> dict[str, Tensor]:
    """The published tensor names and BF16 values; only the correction bias is float32."""
    found: dict[str, Tensor] = {}

    def put(name: str, value: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        found[name] = value.detach().to(dtype).contiguous().cpu().clone()

    put("model.embed_tokens.weight", model.embed.weight)
    for index, layer in enumerate([*model.layers, model.mtp]):
        prefix = f"model.layers.{index}."
        for name, value in layer.named_parameters():
            if name.rsplit(".", 1)[-1] not in ("gates", "ups", "downs", "router"):
                put(prefix + name, value)
        if isinstance(layer.mlp, Moe):
            put(f"{prefix}mlp.gate.weight", layer.mlp.router)
            put(f"{prefix}mlp.gate.e_score_correction_bias", layer.mlp.bias, torch.float32)
            for expert in range(EXPERTS):
                for leaf, stack in (("gate", layer.mlp.gates), ("up", layer.mlp.ups), ("down", layer.mlp.downs)):
                    put(f"{prefix}mlp.experts.{expert}.{leaf}_proj.weight", stack[expert].t())
    prefix = f"model.layers.{LAYERS}."
    for name, value in (("enorm", model.enorm), ("hnorm", model.hnorm), ("eh_proj", model.eh),
                        ("shared_head.norm", model.mtp_norm)):
        put(f"{prefix}{name}.weight", value.weight)
    put("model.norm.weight", model.norm.weight)
    put("lm_head.weight", model.head.weight)
    return found


def config() -> dict[str, object]:
    """config.json in the published form."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [0], "pad_token_id": 6, "ep_size": 1,
        "first_k_dense_replace": FIRST_DENSE, "hidden_act": "silu", "head_dim": ROPE, "hidden_size": HIDDEN,
        "index_head_dim": INDEX_DIM, "index_n_heads": INDEX_HEADS, "index_share_for_mtp_iteration": True,
        "index_topk": INDEX_TOPK, "index_topk_freq": 1, "index_skip_topk_offset": 2, "indexer_rope_interleave": True,
        "indexer_types": INDEXERS, "initializer_range": 0.02, "intermediate_size": DENSE, "kv_lora_rank": KV_RANK,
        "max_position_embeddings": 4096,
        "mlp_layer_types": ["dense"] * FIRST_DENSE + ["sparse"] * (LAYERS - FIRST_DENSE),
        "moe_intermediate_size": EXPERT, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": EXPERTS,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": HEADS, "num_experts_per_tok": TOP,
        "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "num_nextn_predict_layers": 1,
        "q_lora_rank": Q_RANK, "qk_head_dim": NOPE + ROPE, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
        "rms_norm_eps": EPS, "rope_interleave": True, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "routed_scaling_factor": SCALE, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": VALUE, "vocab_size": VOCAB,
    }


def write(model: Model, tokenizer: Path, out: Path) -> None:
    """Shards, index, config and tokenizer."""
    tensors, shards, size = stored(model), [[]], 0
    for name, value in tensors.items():
        if size + value.nbytes > SHARD_BYTES:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += value.nbytes
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, out / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config(), indent=2))
    shutil.copy(tokenizer, out / "tokenizer.json")
    print(f"{total / 1e6:.1f} MB in {len(shards)} shards", flush=True)


def main() -> None:
    tokens, tokenizer, seconds, out = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    Path(out).mkdir(parents=True, exist_ok=True)
    text = torch.from_numpy(np.load(tokens).astype(np.int32))
    write(train(text, float(seconds), device), Path(tokenizer), Path(out))


if __name__ == "__main__":
    main()
