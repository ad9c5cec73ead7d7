"""EXL3 checkpoints and rank slices through the same loader."""

import pytest
import torch
from builders_exl3 import DEMO, exl3_checkpoint

from keys35.exl3.linear import decode_weight
from keys35.files.source import ShardedSource
from keys35.glm.names import Split
from keys35.glm.stream import embed, trunk
from keys35.glm.weights import Keep, WeightStore


@pytest.fixture(scope="module")
def packed(tmp_path_factory, demo_config):
    source = ShardedSource.open(DEMO / "model")
    return exl3_checkpoint(tmp_path_factory.mktemp("exl3"), source, demo_config)


def test_exl3_linears_are_decoded_and_padding_is_cut_off(packed, demo_config):
    store = WeightStore(packed, demo_config)
    module = "model.layers.1.self_attn.kv_a_proj_with_mqa"
    parts = [packed.read(f"{module}.{part}") for part in ("trellis", "suh", "svh")]
    decoded = decode_weight(*parts)
    assert decoded.shape == (128, 256) and not decoded[:, 160:].any()
    assert torch.equal(store.tensor(f"{module}.weight"), decoded[:, :160].T)
    x = torch.randn(3, 128)
    expected = x @ decoded[:, :160]
    assert torch.allclose(store.layer(1).linear("self_attn.kv_a_proj_with_mqa", x), expected, atol=1e-5)


@pytest.mark.parametrize("keep", Keep)
def test_what_a_layer_keeps_changes_reads_but_not_values(packed, demo_config, keep):
    store = WeightStore(packed, demo_config)
    layer = store.layer(2, keep)
    x = torch.randn(2, 128)
    first = layer.linear("mlp.experts.3.gate_proj", x), layer.linear("self_attn.q_a_proj", x)
    read = dict(store.read)
    again = layer.linear("mlp.experts.3.gate_proj", x), layer.linear("self_attn.q_a_proj", x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert (store.read["expert"] == 2 * read["expert"]) == (keep is Keep.DENSE)
    assert store.read["dense"] == read["dense"]


def test_the_slices_of_four_ranks_compose_to_every_tensor(packed, demo_config):
    whole = WeightStore(packed, demo_config)
    ranks = [WeightStore(packed, demo_config, tp=4, rank=rank) for rank in range(4)]
    axis = {Split.OUT: 0, Split.ROW: 0, Split.IN: 1}
    for name, rule in whole.rules.items():
        if rule.expert not in (None, 0, 7):
            continue
        shares = [store.tensor(name) for store in ranks]
        composed = shares[0] if rule.split is Split.REPLICATE else torch.cat(shares, axis[rule.split])
        assert torch.allclose(composed, whole.tensor(name), atol=1e-6), name


def test_a_rank_reads_a_quarter_of_the_sharded_bytes(packed, demo_config):
    whole = WeightStore(packed, demo_config)
    rank = WeightStore(packed, demo_config, tp=4, rank=3)
    for store in (whole, rank):
        for name in store.rules:
            store.tensor(name)
    assert whole.source.total_size == whole.read["sharded"] + whole.read["replicated"]
    assert 4 * rank.read["sharded"] == whole.read["sharded"]
    assert rank.read["replicated"] == whole.read["replicated"]


def test_exl3_pass_runs_through_every_layer(packed, demo_config, prose):
    store = WeightStore(packed, demo_config)
    states = trunk(store, embed(store, prose[:1]))[0]
    assert states.isfinite().all() and states.std() > 0
