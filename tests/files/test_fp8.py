"""FP8 sources: values against the definition, and every scale with exactly one weight."""

from pathlib import Path

import pytest
import torch
from builders import TINY_CONFIG, write_checkpoint

from keys35.errors import SourceError
from keys35.files.source import ShardedSource

SCALE = "w.weight_scale_inv"


def tensors(rows: int = 300, columns: int = 200) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(35)
    weight = (torch.randn(rows, columns, generator=generator) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) / 1000
    return {"w.weight": weight, SCALE: scale, "norm.weight": torch.ones(5, dtype=torch.bfloat16)}


def write(root: Path, held: dict[str, torch.Tensor], **config: object) -> Path:
    return write_checkpoint(root, held, shards=len(held), config=TINY_CONFIG | config)


def by_definition(held: dict[str, torch.Tensor]) -> torch.Tensor:
    weight, scale = held["w.weight"].double(), held[SCALE].double()
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    return weight * scale[rows][:, columns]


def test_weights_are_their_values_times_their_blocks_scales(tmp_path: Path) -> None:
    held = tensors()
    source = ShardedSource.open(write(tmp_path / "s", held), fp8=True)
    assert set(source.tensors) == {"w.weight", "norm.weight"}
    entry, wanted = source.tensors["w.weight"].entry, by_definition(held).float().bfloat16()
    assert (entry.dtype, entry.shape, entry.nbytes) == ("BF16", (300, 200), 120_000)
    assert torch.equal(source.read("w.weight"), wanted)
    for axis, start, stop in ((0, 100, 290), (1, 3, 140)):
        assert torch.equal(source.read_slice("w.weight", axis, start, stop), wanted.narrow(axis, start, stop - start))
    raw = wanted.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert source.raw("w.weight") == raw == b"".join(source.pieces("w.weight"))
    assert b"".join(source.pieces("norm.weight")) == source.raw("norm.weight")


def without(name: str):
    return lambda held: held.pop(name)


def adding(name: str, tensor: torch.Tensor):
    return lambda held: held.update({name: tensor})


FAULTS = {
    "a missing scale": (without(SCALE), {}, "w.weight has no w.weight_scale_inv"),
    "another kind of scale": (adding("w.weight_scale", torch.ones(1)), {}, "w.weight_scale scales nothing"),
    "an unused scale": (adding("v.weight_scale_inv", torch.ones(1, 1)), {}, "v.weight_scale_inv scales"),
    "another block": (adding(SCALE, torch.ones(5, 4)), {}, r"has shape \[5, 4\], \[3, 2\] blocks"),
    "another block by config": (lambda held: None, {"quantization_config": {"weight_block_size": [64, 64]}}, "64, 64"),
    "no FP8 at all": (lambda held: (held.pop(SCALE), held.pop("w.weight")), {}, "leave --fp8"),
}


@pytest.mark.parametrize(("change", "config", "words"), FAULTS.values(), ids=FAULTS)
def test_faults_are_named(tmp_path: Path, change, config: dict, words: str) -> None:
    held = tensors()
    change(held)
    with pytest.raises(SourceError, match=words):
        ShardedSource.open(write(tmp_path / "s", held, **config), fp8=True)
