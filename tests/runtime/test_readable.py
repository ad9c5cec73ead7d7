"""What a rank would miss is refused by name, from headers, before anything is read."""

from pathlib import Path

import pytest
import torch
from builders import TINY_CONFIG, Output, random_source

from keys35.errors import SourceError
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.runtime.launch import check_judged
from keys35.runtime.rank import RankJob, run_job
from keys35.runtime.ranks import Ranks
from keys35.runtime.readable import require_readable

WIDTHS = {1: [2, 3, 3, 3], 2: [2, 2, 3, 4]}
EXPERT, DRAFTER = (f"model.layers.{layer}.mlp.experts.0.down_proj" for layer in (1, 3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_source(tmp_path_factory.mktemp("readable"))


def written(source: Path, root: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    output = Output(source, WIDTHS)
    tensors = output.tensors | changes
    output.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return output.write(root)


@pytest.mark.parametrize(("changes", "words"), [
    ({f"{EXPERT}.svh": None}, f"{EXPERT}.svh is missing"),
    ({f"{EXPERT}.suh": None}, f"{EXPERT}.suh is missing"),
    ({f"{EXPERT}.trellis": None}, f"{EXPERT}.weight is missing"),
    ({f"{EXPERT}.svh": torch.ones(64).half()}, rf"{EXPERT}.svh has shape \[64\]"),
    ({"model.norm.weight": None}, "model.norm.weight is missing"),
    ({f"{DRAFTER}.suh": None}, f"{DRAFTER}.suh is missing"),
])
def test_what_is_missing_is_refused_before_anything_is_read(
    source: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], words: str
) -> None:
    """A scale's absence was a traceback, after the source had been streamed; a tensor's was told of then, too."""
    out = written(source, tmp_path / "out", changes)
    with pytest.raises(SourceError, match=words):
        check_judged(out, 1, source, TINY_CONFIG["vocab_size"])
    job = RankJob(str(out), str(tmp_path), prompt=(1, 2), new_tokens=1, draft=True)
    with pytest.raises(SourceError, match=words):
        run_job(job, Ranks(), torch.device("cpu"))


def test_a_drafter_is_asked_for_where_it_is_used(source: Path, tmp_path: Path) -> None:
    """Checkpoints of others come without it, and say that they have one."""
    out = written(source, tmp_path / "out", {f"{DRAFTER}.suh": None})
    job = RankJob(str(out), str(tmp_path), prompt=(1, 2), new_tokens=1)
    assert len(run_job(job, Ranks(), torch.device("cpu"))["tokens"]) <= 1


def test_sources_and_tied_heads_are_readable(source: Path, tmp_path: Path) -> None:
    tied = random_source(tmp_path / "tied", {**TINY_CONFIG, "tie_word_embeddings": True})
    for root in (source, tied, written(source, tmp_path / "out", {})):
        opened = ShardedSource.open(root)
        require_readable(opened, GlmConfig.from_dict(opened.config))
