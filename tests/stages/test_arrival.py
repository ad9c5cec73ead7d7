"""A source that is still being downloaded: refused with the list, or waited for."""

import threading
import time
from pathlib import Path

import pytest
from builders import some_tensors, write_checkpoint

from keys35.errors import IncompleteError, SourceError
from keys35.files.source import ShardedSource
from keys35.progress import Progress, Tick
from keys35.stages.arrival import wait_for_source

SHARD = "model-0000{}-of-00004.safetensors"


@pytest.fixture
def arriving(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """Two of four shards are there, one of them cut; the others' bytes come beside."""
    root = write_checkpoint(tmp_path / "model", some_tensors(4), shards=4)
    whole = {SHARD.format(n): (root / SHARD.format(n)).read_bytes() for n in (2, 3, 4)}
    for name in list(whole)[:2]:
        (root / name).unlink()
    (root / SHARD.format(2)).with_suffix(".safetensors.incomplete").write_bytes(whole[SHARD.format(2)][:50])
    return root, whole


def test_what_is_missing_is_listed(arriving) -> None:
    root, whole = arriving
    with pytest.raises(IncompleteError, match=r"2 files.*not there: model-00002.*model-00003.*1 are arriving.*--wait"):
        ShardedSource.open(root)
    for name, data in whole.items():
        (root / name).write_bytes(data[:-7])
    with pytest.raises(IncompleteError, match=r"(?s)3 shards are not whole.*00002.*needs.*00003.*00004"):
        ShardedSource.open(root)


def test_waiting_ends_with_the_last_whole_shard(arriving) -> None:
    root, whole = arriving
    ticks: list[Tick] = []

    def download() -> None:
        for name, data in whole.items():
            time.sleep(0.1)
            (root / name).write_bytes(data[:-7])
            time.sleep(0.1)
            (root / name).write_bytes(data)

    thread = threading.Thread(target=download)
    thread.start()
    wait_for_source(root, Progress(show=ticks.append), poll_s=0.02)
    thread.join()
    assert len(ShardedSource.open(root).shards) == 4
    assert ticks[-1].done == ticks[-1].total == 4 and ticks[0].done == 0


@pytest.mark.parametrize("suffix", [".aria2", ".st"])
def test_a_file_of_full_length_is_not_whole_while_its_downloader_still_fills_it(arriving, suffix) -> None:
    """aria2 and axel write segments side by side: the length and the header are there long before the tensors."""
    root, whole = arriving
    for name, data in whole.items():
        (root / name).write_bytes(data)
    control = [root / (SHARD.format(n) + suffix) for n in (3, 4)]
    for path in control:
        path.touch()
    (root / SHARD.format(4)).write_bytes(bytes(len(whole[SHARD.format(4)])))  # not even the header is there
    with pytest.raises(IncompleteError, match=rf"(?s)2 shards are not whole.*00003.*00004.*\{suffix}"):
        ShardedSource.open(root)

    def finish() -> None:
        time.sleep(0.2)
        (root / SHARD.format(4)).write_bytes(whole[SHARD.format(4)])
        for path in control:
            path.unlink()

    thread = threading.Thread(target=finish)
    thread.start()
    wait_for_source(root, Progress(), poll_s=0.02)
    thread.join()
    assert len(ShardedSource.open(root).shards) == 4


def test_what_waiting_cannot_mend_is_refused_at_once(arriving) -> None:
    root, _ = arriving
    (root / SHARD.format(3)).write_bytes(b"x" * 100)
    with pytest.raises(SourceError, match="header length") as refusal:
        wait_for_source(root, Progress(), poll_s=0.02)
    assert not isinstance(refusal.value, IncompleteError)


def test_a_source_of_one_file_is_waited_for_too(tmp_path) -> None:
    root = write_checkpoint(tmp_path / "model", some_tensors(4), shards=1)
    [shard], index = root.glob("*.safetensors"), root / "model.safetensors.index.json"
    whole = shard.read_bytes()
    shard.unlink()
    index.unlink()
    shard = root / "model.safetensors"
    shard.write_bytes(whole[:-7])
    thread = threading.Timer(0.2, lambda: shard.write_bytes(whole))
    thread.start()
    wait_for_source(root, Progress(), poll_s=0.02)
    thread.join()
    assert len(ShardedSource.open(root).shards) == 1


@pytest.mark.parametrize("text", ["[]", "3", '{"weight_map"'])
def test_an_index_that_is_none_is_refused(arriving, text) -> None:
    root, _ = arriving
    (root / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SourceError, match=r"index\.json.*download"):
        wait_for_source(root, Progress(), poll_s=0.02)
