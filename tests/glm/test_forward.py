"""The forward pass against transformers' own implementation of the architecture, and against itself."""

import dataclasses
from functools import partial

import pytest
import torch
from builders_exl3 import DEMO, random_source

from keys35.files.source import ShardedSource
from keys35.glm.attention import LayerCache
from keys35.glm.block import Block, Observer, sum_shares
from keys35.glm.config import GlmConfig
from keys35.glm.layer import (
    behind_attention,
    behind_mlp,
    decoder_layer,
    feed_forward,
    gated_mlp,
    route,
    show_attention,
)
from keys35.glm.stream import Head, embed, mtp, trunk
from keys35.glm.weights import Keep, Overlay, WeightStore


@pytest.fixture(scope="module")
def reference(prose):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO / "model", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return [model(window[None]).logits[0] for window in prose[:4]]


def test_streamed_logits_equal_transformers_beyond_index_topk(demo_store, demo_config, prose, reference):
    assert len(prose[0]) > demo_config.index_topk
    hidden = trunk(demo_store, embed(demo_store, prose[:4]))
    head = Head.of_trunk(demo_store)
    worst = max((head(x) - expected).abs().max() for x, expected in zip(hidden, reference, strict=True))
    assert worst < 1e-3


def test_windows_up_to_index_topk_need_no_indexer(demo_store, demo_config, prose):
    short = [prose[0][:128]]
    everything = dataclasses.replace(demo_config, index_topk=127)
    narrow = WeightStore(demo_store.source, everything)
    dense = trunk(demo_store, embed(demo_store, short))[0]
    sparse = trunk(narrow, embed(narrow, short))[0]
    assert torch.allclose(dense[:127], sparse[:127], atol=1e-5)
    assert not torch.allclose(dense[127], sparse[127], atol=1e-5)


def test_windows_of_different_lengths_do_not_see_each_other(demo_store, prose):
    windows = [prose[0][:200], prose[1][:77]]
    together = trunk(demo_store, embed(demo_store, windows))
    for window, states in zip(windows, together, strict=True):
        alone = trunk(demo_store, embed(demo_store, [window]))[0]
        assert torch.allclose(states, alone, atol=1e-4)


def test_mtp_predicts_the_token_after_next(demo_store, prose):
    embedded = embed(demo_store, prose)
    hidden = trunk(demo_store, embedded)
    head = Head.of_trunk(demo_store).for_mtp(demo_store)

    def top1(store: WeightStore) -> float:
        states = mtp(store, hidden, embedded)
        hits = [head(x)[:-1].argmax(-1) == tokens[2:] for x, tokens in zip(states, prose, strict=True)]
        return torch.cat(hits).float().mean().item()

    other = dataclasses.replace(demo_store.config, mtp_hidden="post_norm")
    trained, foreign = top1(demo_store), top1(WeightStore(demo_store.source, other))
    assert trained >= 0.42 and foreign != trained


def test_step_by_step_decoding_equals_one_pass(demo_store, demo_config, prose):
    tokens = prose[2][:160]  # the last 32 steps choose among more than index_topk keys
    embedded = embed(demo_store, [tokens])[0]
    whole = trunk(demo_store, [embedded])[0]
    layers = [demo_store.layer(layer, Keep.ALL) for layer in range(demo_config.num_hidden_layers)]
    caches = [LayerCache() for _ in layers]
    steps = [embedded[:100], *embedded[100:].split(1)]
    results = []
    for rows in steps:
        windows, selections = [rows], [None]
        for layer, (weights, cache) in enumerate(zip(layers, caches, strict=True)):
            windows, selections = decoder_layer(demo_config, layer, weights, windows, selections, caches=[cache])
        results.append(windows[0])
    assert torch.allclose(torch.cat(results), whole, atol=2e-4)


class Recorder(Observer):
    def __init__(self) -> None:
        self.inputs, self.routed = {}, {}

    def linear_input(self, modules, rows, where):
        assert len(rows) == len(where)
        for module in modules:
            self.inputs.setdefault(module, []).append((rows, where))

    def moe(self, layer, rows, expert_ids, expert_weights, routed, where):
        self.routed[layer] = (rows, expert_ids, expert_weights, routed, where)


@pytest.fixture(scope="module")
def recorded(demo_store, prose):
    recorder = Recorder()
    embedded = embed(demo_store, [prose[0], prose[1][:130]])
    mtp(demo_store, trunk(demo_store, embedded, observer=recorder), embedded, observer=recorder)
    return recorder


def test_every_dense_linear_is_observed_with_rows_of_its_width(recorded, demo_store):
    dense = {rule.module: rule for rule in demo_store.rules.values() if rule.role == "dense"}
    assert set(recorded.inputs) == set(dense)
    for module, seen in recorded.inputs.items():
        lengths = 512 + 130 - (2 if module.startswith("model.layers.4.") else 0)
        assert sum(len(rows) for rows, _ in seen) == lengths
        assert all(rows.shape[1] == dense[module].in_features for rows, _ in seen)


def test_rows_know_their_sequence_and_position(recorded):
    where = recorded.routed[2][4]
    expected = [(0, i) for i in range(512)] + [(1, i) for i in range(130)]
    assert where.tolist() == [list(pair) for pair in expected]


def test_routing_counts_add_up_and_routed_output_is_the_weighted_sum(recorded, demo_config, demo_store):
    for layer in (1, 2, 3, 4):
        rows, ids, weights, routed, _ = recorded.routed[layer]
        counts = torch.bincount(ids.flatten(), minlength=demo_config.n_routed_experts)
        assert counts.sum() == len(rows) * demo_config.num_experts_per_tok
        stored, again = demo_store.layer(layer), torch.zeros_like(routed)
        for expert in range(demo_config.n_routed_experts):
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            linears = [partial(stored.linear, f"mlp.experts.{expert}.{leaf}_proj") for leaf in ("gate", "up", "down")]
            again += share * gated_mlp(rows, *linears)
        assert torch.allclose(again, routed, atol=1e-5)


def test_correction_bias_must_stay_float32(demo_config):
    """Biases as GLM-5.2 has them, in [6.817, 7.063]: rounded to BF16, most tokens change experts."""
    config = dataclasses.replace(demo_config, n_routed_experts=256, num_experts_per_tok=8)
    generator = torch.Generator().manual_seed(0)
    gate = torch.randn(256, config.hidden_size, generator=generator) * 0.005
    bias = 6.817 + 0.246 * torch.rand(256, generator=generator)
    rows = torch.randn(2000, config.hidden_size, generator=generator)

    class Router:
        def __init__(self, bias: torch.Tensor) -> None:
            self.values = {"mlp.gate.weight": gate, "mlp.gate.e_score_correction_bias": bias}

        def tensor(self, name: str) -> torch.Tensor:
            return self.values[name]

    exact, _ = route(config, Router(bias), rows)
    rounded, _ = route(config, Router(bias.bfloat16()), rows)
    naive = ((rows @ gate.T).sigmoid() + bias).topk(8).indices
    changed = (exact.sort().values != rounded.sort().values).any(1).float().mean()
    assert torch.equal(exact.sort().values, naive.sort().values)
    assert changed > 0.9


def test_stored_bias_stays_float32_in_a_bf16_store(demo_config):
    store = WeightStore(ShardedSource.open(DEMO / "model"), demo_config, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(store.tensor(name), store.source.read(name))
    assert store.tensor("model.layers.1.mlp.gate.weight").dtype == torch.bfloat16


def test_the_bias_chooses_but_does_not_weigh(demo_store, demo_config, prose):
    rows = torch.randn(50, demo_config.hidden_size, generator=torch.Generator().manual_seed(1))
    weights = demo_store.layer(2)
    ids, shares = route(demo_config, weights, rows)
    scores = (rows @ weights.tensor("mlp.gate.weight").T).sigmoid().gather(1, ids)
    assert torch.allclose(shares, 2.5 * scores / scores.sum(1, keepdim=True))


def test_bf16_pass_is_close_to_float32(demo_config, demo_store, prose):
    store = WeightStore(demo_store.source, demo_config, dtype=torch.bfloat16)
    coarse = Head.of_trunk(store)(trunk(store, embed(store, prose[:1]))[0])
    fine = Head.of_trunk(demo_store)(trunk(demo_store, embed(demo_store, prose[:1]))[0])
    kl = torch.nn.functional.kl_div(coarse.log_softmax(-1), fine.log_softmax(-1), log_target=True, reduction="sum")
    assert kl / len(prose[0]) < 5e-3


def test_overlay_replaces_one_expert_only(demo_store, demo_config, recorded):
    rows, ids, _, _, where = recorded.routed[3]
    base = demo_store.layer(3, Keep.ALL)
    zero = torch.zeros(demo_config.moe_intermediate_size, demo_config.hidden_size)
    changed = Overlay(base, {"mlp.experts.5.down_proj": zero})

    def run(weights):
        return feed_forward(Block(demo_config, 3, weights, Observer(), sum_shares), rows, where)

    differs = (run(base) != run(changed)).any(1)
    assert torch.equal(differs, (ids == 5).any(1))


def test_a_layer_reads_each_expert_once_per_pass(demo_config, prose):
    store = WeightStore(ShardedSource.open(DEMO / "model"), demo_config)
    trunk(store, embed(store, prose[:3]))
    per_layer = demo_config.n_routed_experts * 3 * demo_config.hidden_size * demo_config.moe_intermediate_size
    assert store.read["expert"] == 3 * per_layer * 2


def test_another_size_works_by_configuration_alone(tmp_path):
    config = GlmConfig.from_dict(
        {
            "model_type": "glm_moe_dsa", "hidden_size": 256, "num_hidden_layers": 3,
            "num_nextn_predict_layers": 1, "intermediate_size": 384, "moe_intermediate_size": 128,
            "first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 3,
            "n_shared_experts": 2, "routed_scaling_factor": 1.5, "num_attention_heads": 4,
            "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 24,
            "indexer_types": ["full", "shared", "full"], "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "vocab_size": 512, "eos_token_id": 3,
        }
    )  # fmt: skip
    store = WeightStore(random_source(tmp_path, config), config)
    tokens = [torch.arange(60) % 512]
    embedded = embed(store, tokens)
    hidden = trunk(store, embedded)
    states = mtp(store, hidden, embedded)[0]
    assert states.shape == (59, 256) and states.isfinite().all()
    assert Head.of_trunk(store)(hidden[0]).shape == (60, 512)


class Inputs(Observer):
    """What was seen of each group of linears, with the windows and places."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, ...], list[torch.Tensor]] = {}

    def linear_input(self, modules: tuple[str, ...], rows: torch.Tensor, where: torch.Tensor) -> None:
        self.seen.setdefault(modules, []).extend([rows, where])


def entering(store, config, prose, layer):
    """States of three windows and a shorter one as they enter a layer, and their selections."""
    states, chosen = [*embed(store, prose[:3]), *embed(store, [prose[3][:100]])], [None] * 4
    for before in range(layer):
        states, chosen = decoder_layer(config, before, store.layer(before), states, chosen)
    return states, chosen


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_what_enters_attention_is_shown_as_a_pass_shows_it(demo_store, demo_config, prose, layer, mixed):
    """Over windows of two lengths, beyond index_topk, with and without a selection that is handed on."""
    states, chosen = entering(demo_store, demo_config, prose, layer)
    whole, shown, weights = Inputs(), Inputs(), demo_store.layer(layer)
    behind_attention(demo_config, layer, weights, states, chosen, observer=whole)
    show_attention(demo_config, layer, weights, states, chosen, observer=shown, mixed=mixed)
    o_proj = (f"model.layers.{layer}.self_attn.o_proj",)
    assert len(whole.seen) == 3 and set(shown.seen) == set(whole.seen) - (set() if mixed else {o_proj})
    for modules, parts in shown.seen.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, whole.seen[modules], strict=True))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_is_its_two_halves(demo_store, demo_config, prose, layer):
    """To the bit, for what is watched, too; a dense layer, and one of experts that takes over a selection."""
    states, chosen = entering(demo_store, demo_config, prose, layer)
    weights, before = demo_store.layer(layer), [x.clone() for x in states]
    whole, halves = Inputs(), Inputs()
    wanted, passed_on = decoder_layer(demo_config, layer, weights, states, chosen, observer=whole)
    middle, selected = behind_attention(demo_config, layer, weights, states, chosen, observer=halves)
    kept = [x.clone() for x in middle]
    found, selected = behind_mlp(demo_config, layer, weights, middle, selected, observer=halves)
    for ours, theirs in ((found, wanted), (middle, kept), (states, before)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(selected, passed_on, strict=True))
    assert list(whole.seen) == list(halves.seen)
    for modules, parts in halves.seen.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, whole.seen[modules], strict=True))


def test_which_of_tied_keys_are_selected_does_not_depend_on_the_rows_beside(demo_store, demo_config, prose):
    """Far beyond the trained length hundreds of layer 1's scores are 0; a draft is checked two rows at a time."""
    before = embed(demo_store, [torch.cat(prose[:3])[:1200]])
    [states], _ = decoder_layer(demo_config, 0, demo_store.layer(0), before, [None])
    one, found = partial(decoder_layer, demo_config, 1, demo_store.layer(1), selections=[None]), []
    for step in (1, 2):
        cache, rows = LayerCache(), []
        one([states[:1160]], caches=[cache])
        for first in range(1160, 1200, step):
            _, [chosen] = one([states[first : first + step]], caches=[cache])
            rows += [row.nonzero().flatten().tolist() for row in chosen]
        found.append(rows)
    assert found[0] == found[1] and all(len(row) == demo_config.index_topk for row in found[0])
