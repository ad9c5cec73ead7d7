"""A unit's files written by threads: the bytes of a plain save, or nothing."""

from pathlib import Path

import pytest
import torch

from keys35.errors import ResumeError
from keys35.exl3.linear import EncodedLinear
from keys35.files import atomic
from keys35.files.atomic import save_pieces
from keys35.files.hashed import Hashed
from keys35.stages.unit_files import UnitFiles

SHAPES = {"layer.2.up": (128, 256), "layer.10.up": (128, 256), "layer.10.down": (256, 128)}
WIDTHS = (2, 2.5, 3)


def encoded(name: str, bits: float) -> EncodedLinear:
    generator = torch.Generator().manual_seed(int(len(name) * bits))
    k, n = SHAPES[name]
    trellis = torch.randint(-999, 999, (k // 16, n // 16, int(16 * bits)), dtype=torch.int16, generator=generator)
    return EncodedLinear(trellis, torch.rand(k).half(), torch.rand(n).half(), float(bits), 0.1, False)


def test_the_bytes_are_those_of_a_plain_save_in_whatever_order_linears_come(tmp_path: Path) -> None:
    found = {(name, bits): encoded(name, bits) for name in SHAPES for bits in WIDTHS}
    with UnitFiles({bits: tmp_path / f"k{bits}" for bits in WIDTHS}, SHAPES) as files:
        for name, bits in reversed(found):
            files.give(name, found[name, bits])
        saved = files.finish()
    for bits in WIDTHS:
        tensors = {}
        for name in SHAPES:
            tensors |= found[name, bits].tensors(name)
        assert save_pieces(tmp_path / "plain", tensors) == saved[tmp_path / f"k{bits}"]
        assert (tmp_path / "plain").read_bytes() == (tmp_path / f"k{bits}").read_bytes()


def test_a_unit_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), UnitFiles({2: tmp_path / "k2"}, SHAPES) as files:
        files.give("layer.10.up", encoded("layer.10.up", 2))
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_heard_of_and_ends_all_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, piece: bytes, *own: object) -> None:
        raise OSError(atomic.FULL[0], "no space")

    monkeypatch.setattr(Hashed, "write", full)
    with pytest.raises(ResumeError, match="disk full"), UnitFiles({b: tmp_path / f"k{b}" for b in WIDTHS}, SHAPES) as f:
        for name in SHAPES:
            f.give(name, encoded(name, 2))
        f.finish()
    assert not list(tmp_path.iterdir())
