"""EXL3 checkpoints and rank slices through the same loader."""

import pytest
import torch
from builders import write_checkpoint
from builders_exl3 import DEMO, exl3_checkpoint

from keys35.exl3.codebook import marker_tensor
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


@pytest.mark.parametrize("codebook", ["mul1", "mcg", "3inst"])
def test_the_marker_beside_a_trellis_says_its_codebook(packed, demo_config, codebook):
    """mcg is what older checkpoints of others have; without a marker it is 3inst."""
    store = WeightStore(packed, demo_config)
    module = "model.layers.1.self_attn.q_a_proj"
    parts = {part: packed.read(f"{module}.{part}") for part in ("trellis", "suh", "svh")}
    wanted = decode_weight(*parts.values(), codebook)
    marker = {codebook: marker_tensor(codebook)} if codebook != "3inst" else {}
    found = store.unpack(store.rules[f"{module}.weight"], parts | marker)
    assert torch.equal(found, wanted[: found.shape[1], : found.shape[0]].T)


def test_a_checkpoint_with_mcg_markers_is_read_as_such(tmp_path, packed, demo_config):
    module = "model.layers.1.self_attn.q_a_proj"
    tensors = {name: packed.read(name) for name in packed.tensors if name.startswith(module)}
    tensors[f"{module}.mcg"] = marker_tensor("mcg")
    del tensors[f"{module}.mul1"]
    store = WeightStore(ShardedSource.open(write_checkpoint(tmp_path / "mcg", tensors, shards=1)), demo_config)
    assert set(store.stored(store.rules[f"{module}.weight"])) == {"trellis", "suh", "svh", "mcg"}
