"""A whole FP8 source: refused without the flag, planned as the BF16 one with it, carried tensors leave as BF16."""

import json
from pathlib import Path

import pytest
import torch
from builders import write_checkpoint
from tiny import TINY, tiny_recipe, tiny_source

from keys35.errors import PlanError, SourceError
from keys35.files.atomic import CHUNK_BYTES
from keys35.files.shards import TensorSpec, write_shard
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import TensorRule, census
from keys35.progress import Progress
from keys35.runtime.panel import Panel
from keys35.stages.assemble import _compare_carried
from keys35.stages.check import check
from keys35.stages.panels import validate_panel
from keys35.stages.plan import plan
from keys35.stages.scan import scan


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny model in BF16, and with every linear in FP8 as the public checkpoint has them."""
    root = tmp_path_factory.mktemp("fp8")
    plain = tiny_source(root / "bf16")
    held = {}
    opened = ShardedSource.open(plain)
    for name, rule in census(GlmConfig.from_dict(TINY)).items():
        value = opened.read(name)
        if rule.projection:
            blocks = [-(-size // 128) for size in value.shape]
            held[name] = (value.float() * 1000).to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = torch.full(blocks, 1e-3)
        else:
            held[name] = value
    side = {"tokenizer.json": (plain / "tokenizer.json").read_bytes()}
    return plain, write_checkpoint(root / "fp8", held, shards=5, config=TINY, side_files=side)


def test_plan_needs_the_flag_and_then_gives_the_same_output(sources: tuple[Path, Path]) -> None:
    plain, fp8 = sources
    with pytest.raises(SourceError, match="FP8 source.*use the BF16 one, or say --fp8"):
        plan(fp8, tiny_recipe(), tp=1)
    found, wanted = plan(fp8, tiny_recipe().with_fp8(), tp=1), plan(plain, tiny_recipe(), tp=1)
    assert (found.tensors, found.output_bytes, found.shard_bytes) == (
        wanted.tensors, wanted.output_bytes, wanted.shard_bytes)


def test_every_value_is_read_once_and_near_the_original(sources: tuple[Path, Path]) -> None:
    plain, fp8 = (ShardedSource.open(root, fp8=root.name == "fp8") for root in sources)
    assert scan(sources[1], Progress(), fp8=True) == len(plain.tensors)
    for name in plain.tensors:
        a, b = plain.read(name).float(), fp8.read(name).float()
        assert (a - b).abs().max() <= 0.07 * a.abs().max(), name


def test_either_kind_can_be_what_a_checkpoint_is_judged_by(sources: tuple[Path, Path], tmp_path: Path) -> None:
    plain, fp8 = sources
    assert [ShardedSource.open(root, fp8=None).fp8 for root in sources] == [False, True]
    panel = Panel.of("words", [torch.arange(20, 44)], ["words"])
    found = validate_panel(plain, fp8, panel, 1, tmp_path, Progress(), device="cpu")
    assert 0 < found["metrics"]["kl"] < 0.1, "what FP8 lost"


def test_a_checkpoint_is_checked_against_what_it_was_made_from(sources: tuple[Path, Path], tmp_path: Path) -> None:
    kinds = ("BF16", "FP8")
    for other, kind, made_from in zip(sources, kinds, kinds[::-1], strict=True):
        report = {"recipe": {"source": {"fp8": made_from == "FP8"}}}
        (tmp_path / "KEYS35_ASSEMBLY_REPORT.json").write_text(json.dumps(report))
        with pytest.raises(SourceError, match=f"holds {kind} weights, and .* was made from {made_from} ones"):
            check(tmp_path, other)


def test_a_large_carried_tensor_is_written_and_read_back(tmp_path: Path) -> None:
    """GLM-5.3's kv_b is 29 MB as BF16, more than files are read at a time."""
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    held = {name: torch.randn(33024, 128).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((258, 1), 0.01)}
    source = ShardedSource.open(write_checkpoint(tmp_path / "fp8", held, shards=1), fp8=True)
    entry, path = source.tensors[name].entry, tmp_path / "out.safetensors"
    assert entry.nbytes > CHUNK_BYTES
    write_shard(path, [TensorSpec(name, entry.dtype, entry.shape, lambda: source.pieces(name))])
    rules = [TensorRule(name, entry.shape)]
    _compare_carried(source, path, rules)
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(PlanError, match="read back differently"):
        _compare_carried(source, path, rules)
