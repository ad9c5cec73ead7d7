"""A source with NaN and Inf: named before any work by the scan, and refused by the stages that meet it."""

import pytest
import torch
from builders import write_checkpoint
from small import small_recipe, small_source

from keys35.errors import SourceError
from keys35.files.source import ShardedSource
from keys35.progress import Progress
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.scan import scan

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"  # no layer's states pass through it


def broken_source(source, root, *damage):
    opened = ShardedSource.open(source)
    tensors = {name: opened.read(name) for name in opened.tensors}
    for name, index, value in damage:
        tensors[name][index] = value
    side = {"tokenizer.json": (source / "tokenizer.json").read_bytes()}
    return write_checkpoint(root, tensors, shards=2, config=opened.config, side_files=side)


def test_a_sound_source_passes(source):
    assert scan(source, Progress()) == len(ShardedSource.open(source).tensors)


def test_every_broken_tensor_is_named_with_index_and_count(source, tmp_path):
    damage = [(EXPERT, (3, 5), float("nan")), (EXPERT, (3, 6), float("nan")), (NORM, (7,), float("inf"))]
    with pytest.raises(SourceError) as caught:
        scan(broken_source(source, tmp_path / "source", *damage), Progress())
    assert f"{EXPERT}: 2 values are not finite, the first is nan at [3, 5]" in str(caught.value)
    assert f"{NORM}: 1 values are not finite, the first is inf at [7]" in str(caught.value)


@pytest.mark.parametrize(("name", "index"), [(EXPERT, (3, 5)), (NORM, (7,)), (HEAD, (9, 1))])
def test_measure_refuses_what_it_meets(source, tmp_path, name, index):
    broken = broken_source(source, tmp_path / "source", (name, index, float("nan")))
    with open_job(broken, small_recipe(), tmp_path / "work") as job, pytest.raises(SourceError) as caught:
        measure(job, Progress())
    assert f"{name}: 1 values are not finite, the first is nan at {list(index)}" in str(caught.value)
    assert not list((tmp_path / "work" / "experts").rglob("*.safetensors"))


def test_the_small_source_is_the_demo(tmp_path, source):
    again = ShardedSource.open(small_source(tmp_path / "again"))
    first = ShardedSource.open(source)
    assert all(torch.equal(first.read(name), again.read(name)) for name in first.tensors)
