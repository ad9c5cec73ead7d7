"""Fetch from a real HTTP server: one pinned commit, every byte proved, a kill costs the files in flight."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from builders import write_checkpoint
from fake_hub import Entry, FakeHub
from huggingface_hub import HfApi

from keys35 import progress
from keys35.errors import PlanError, PublishError, ResumeError, SourceError
from keys35.files.atomic import sha256_file
from keys35.files.ledger import held
from keys35.progress import Progress
from keys35.publish.fetch import fetch
from keys35.publish.hub import Hub

CONTEXT = multiprocessing.get_context("forkserver")
UNWANTED = {"pytorch_model.bin": b"pickle", "model.gguf": b"GGUF", ".gitattributes": b"x"}


@pytest.fixture
def stocked(server: FakeHub, source: Path) -> FakeHub:
    files = {path.name: Entry(path.read_bytes(), path.suffix == ".safetensors") for path in source.iterdir()}
    server.state.put("source", files | {name: Entry(data, False) for name, data in UNWANTED.items()})
    return server


def fetched(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def downloads(server: FakeHub) -> list[str]:
    return server.state.asked(r"^GET .*/resolve/")


@pytest.mark.parametrize("fail_every", [0, 3])
def test_fetches_and_verifies(hub: Hub, stocked: FakeHub, source: Path, tmp_path: Path, fail_every: int,
                              caplog: pytest.LogCaptureFixture) -> None:
    stocked.state.fail_every = fail_every
    seen = []
    done = fetch(hub, tmp_path / "to", Progress(show=seen.append))
    assert fetched(tmp_path / "to") == fetched(source)
    assert done.revision == stocked.state.head and done.files == len(fetched(source))
    assert done.bytes == sum(map(len, fetched(source).values()))
    assert done.source.config["model_type"] == "glm_moe_dsa" and seen[-1].done == done.files
    if fail_every:
        assert {failure for _, _, failure in stocked.state.calls} >= {"500", "503", "lost"}
        told = [record.message for record in caplog.records if record.name == "keys35.publish.hub"]
        assert any("again in" in message for message in told), "three minutes without a network were silent"
    before = len(downloads(stocked))
    fetch(hub, tmp_path / "to", Progress(show=seen.append))
    assert len(downloads(stocked)) == before and seen[-1].kept == done.files


def test_an_fp8_source_is_fetched_too(hub: Hub, server: FakeHub, tmp_path: Path) -> None:
    """What was asked for is there and verified; that --fp8 is needed is said by who reads it."""
    held = {"a.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)}
    fp8 = write_checkpoint(tmp_path / "fp8", held, shards=2)
    server.state.put("source", {path.name: Entry(path.read_bytes(), False) for path in fp8.iterdir()})
    done = fetch(hub, tmp_path / "to")
    assert done.source.fp8 and fetched(tmp_path / "to") == fetched(fp8)


def test_a_revision_is_pinned_while_the_branch_moves(
    hub: Hub, stocked: FakeHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, enter = stocked.state.head, stocked.state.enter

    def move(method: str, path: str) -> str:
        if "/resolve/" in path and stocked.state.head == first:
            stocked.state.put("later", stocked.state.files | {"LICENSE": Entry(b"be unkind", False)})
        return enter(method, path)

    monkeypatch.setattr(stocked.state, "enter", move)
    assert fetch(hub, tmp_path / "to").revision == first != stocked.state.head
    assert (tmp_path / "to/LICENSE").read_bytes() == (source / "LICENSE").read_bytes()
    assert fetch(hub, tmp_path / "to").revision == stocked.state.head
    assert (tmp_path / "to/LICENSE").read_bytes() == b"be unkind"
    assert fetch(hub, tmp_path / "to", revision=first).revision == first
    assert (tmp_path / "to/LICENSE").read_bytes() == (source / "LICENSE").read_bytes()
    with pytest.raises(PublishError, match="check the name"):
        fetch(hub, tmp_path / "to", revision="no-such-tag")


def test_a_body_that_breaks_off_is_continued(
    hub: Hub, stocked: FakeHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, broken = stocked.state.enter, []

    def cut(method: str, path: str) -> str:
        enter(method, path)
        if method == "GET" and path.endswith("00001-of-00006.safetensors") and not broken:
            broken.append(path)
            return "reset"
        return ""

    monkeypatch.setattr(stocked.state, "enter", cut)
    fetch(hub, tmp_path / "to")
    assert broken and fetched(tmp_path / "to") == fetched(source)


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data[:-1]])
def test_a_file_damaged_on_disk_is_fetched_again(hub: Hub, stocked: FakeHub, source: Path, tmp_path: Path,
                                                 change) -> None:
    fetch(hub, tmp_path / "to")
    name = "model-00002-of-00006.safetensors"
    (tmp_path / "to" / name).write_bytes(change((source / name).read_bytes()))
    before = len(downloads(stocked))
    fetch(hub, tmp_path / "to")
    assert downloads(stocked)[before:] == [f"/someone/tiny/resolve/{stocked.state.head}/{name}"]
    assert sha256_file(tmp_path / "to" / name) == sha256_file(source / name)


def test_wrong_bytes_from_the_hub(hub: Hub, stocked: FakeHub, source: Path, tmp_path: Path) -> None:
    name = "model-00004-of-00006.safetensors"
    stocked.serve_instead[name] = (source / name).read_bytes()[:-1] + b"?"
    with pytest.raises(PublishError, match=f"fetched 2 times and still wrong: {name}: the hub holds"):
        fetch(hub, tmp_path / "to")


def run_in_process(url: str, repo: str, to: Path) -> None:
    sleep = time.sleep
    progress.release = lambda: None
    time.sleep = lambda seconds: sleep(min(seconds, 0.05))
    fetch(Hub(repo, HfApi(endpoint=url, token="none"), waits=(0.05,) * 8), to)


def test_killed_on_the_way(stocked: FakeHub, source: Path, tmp_path: Path, hub: Hub) -> None:
    to, state = tmp_path / "to", stocked.state
    for files in (2, 6):
        process = CONTEXT.Process(target=run_in_process, args=(stocked.url, stocked.repo, to))
        process.start()
        with state.changed:
            assert state.changed.wait_for(lambda files=files: len(downloads(stocked)) >= files, timeout=30)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        (to / ".cache/huggingface/download").mkdir(parents=True, exist_ok=True)
        (to / ".cache/huggingface/download/shard.1234.incomplete").write_bytes(b"left by a kill")
    whole = {name for name, data in fetched(to).items() if data == (source / name).read_bytes()}
    before = len(downloads(stocked))
    fetch(hub, to)
    assert fetched(to) == fetched(source)
    assert not whole & {path.rpartition("/")[2] for path in downloads(stocked)[before:]}, "what was whole is kept"
    assert list(to.rglob("*.incomplete")) == []


@pytest.mark.parametrize("name", ["../evil.json", "a/../../evil.json", "a\\evil.json"])
def test_names_that_leave_the_folder(hub: Hub, stocked: FakeHub, tmp_path: Path, name: str) -> None:
    stocked.state.put("evil", stocked.state.files | {name: Entry(b"{}", False)})
    with pytest.raises(PublishError, match="outside the folder"):
        fetch(hub, tmp_path / "deep/to")
    assert downloads(stocked) == [] and not (tmp_path / "deep").exists()


def test_no_usable_checkpoint_and_no_space(
    hub: Hub, stocked: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict(stocked.state.files)
    del files["model-00003-of-00006.safetensors"]
    stocked.state.put("incomplete", files)
    with pytest.raises(SourceError, match="model-00003-of-00006.safetensors"):
        fetch(hub, tmp_path / "to")
    monkeypatch.setattr("keys35.files.atomic.free_bytes", lambda path: 10)
    with pytest.raises(PlanError, match="10 are free"):
        fetch(hub, tmp_path / "other")


def test_another_checkpoints_shards_are_refused_first(hub: Hub, stocked: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00099.safetensors").write_bytes(b"old")
    with pytest.raises(PublishError, match="model-00001-of-00099.safetensors"):
        fetch(hub, tmp_path)
    assert downloads(stocked) == []


def test_hashes_that_cannot_be_kept_are_no_fault(hub: Hub, stocked: FakeHub, source: Path, tmp_path: Path) -> None:
    (tmp_path / "to.hashes.json").mkdir()
    fetch(hub, tmp_path / "to")
    assert fetched(tmp_path / "to") == fetched(source)


def test_two_at_once_do_not_fill_one_folder(hub: Hub, stocked: FakeHub, source: Path, tmp_path: Path) -> None:
    """The second took the first one's half files for leftovers of a kill, and the first ended in a missing file."""
    half = tmp_path / "to/.cache/huggingface/download/shard.1234.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"the first one's")
    with held(tmp_path / "to/.cache/keys35"):
        with pytest.raises(ResumeError, match=f"is in use by process {os.getpid()}"):
            fetch(hub, tmp_path / "to")
        assert half.exists() and downloads(stocked) == []
    assert fetch(hub, tmp_path / "to").source.side_files() and fetched(tmp_path / "to") == fetched(source)
