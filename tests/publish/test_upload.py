"""Upload to a real HTTP server: everything lands once and right, whatever fails or is killed on the way."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from fake_hub import Entry, FakeHub
from huggingface_hub import HfApi

from keys35 import progress
from keys35.errors import PublishError
from keys35.files.atomic import sha256_file
from keys35.progress import Progress
from keys35.publish import upload as uploading
from keys35.publish.files import MARKER
from keys35.publish.hub import Hub
from keys35.publish.upload import upload

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["keys35.publish.upload", "huggingface_hub.hf_api", "fake_hub"])


def held(server: FakeHub) -> dict[str, bytes]:
    return {name: entry.data for name, entry in server.state.files.items() if name != ".gitattributes"}


def local(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def assert_complete(server: FakeHub, out: Path) -> None:
    """Exactly the right files, one marker that lists them, and nothing committed after it."""
    there = held(server)
    marker = json.loads(there.pop(MARKER))
    assert there == local(out)
    assert marker["files"] == [{"file": name, "bytes": (out / name).stat().st_size,
                                "sha256": sha256_file(out / name)} for name in sorted(there)]
    with_marker = [MARKER in files for _, files in server.state.commits]
    assert with_marker == sorted(with_marker) and with_marker.count(True) == 1


def test_complete_and_a_second_run_sends_nothing(out: Path, hub: Hub, server: FakeHub) -> None:
    seen = []
    done = upload(out, hub, Progress(show=seen.append))
    assert_complete(server, out)
    assert (done.files, done.revision) == (len(local(out)), server.state.head)
    assert done.bytes == sum(map(len, local(out).values())) and done.sent[-1] == MARKER
    assert server.state.received == sum(p.stat().st_size for p in out.glob("*.safetensors"))
    assert (seen[-1].done, seen[-1].total, seen[-1].kept) == (done.files, done.files, 0)
    assert server.state.asked(r"^PUT /lfs/\w+/2") and server.state.asked(r"^PUT /lfs/\w+$"), "parts and whole files"
    before = len(server.state.calls)
    assert upload(out, hub).sent == ()
    assert [m for m, _, _ in server.state.calls[before:]].count("PUT") == 0
    assert len(server.state.asked("POST .*/commit/")) == len(server.state.commits) - 1


def test_every_third_call_fails(out: Path, hub: Hub, server: FakeHub) -> None:
    server.state.fail_every = 3
    upload(out, hub)
    assert_complete(server, out)
    failed = {failure for _, _, failure in server.state.calls}
    assert failed == {"", "500", "503", "reset", "lost"}
    received = server.state.received
    assert upload(out, hub).sent == () and server.state.received == received


def run_in_process(url: str, repo: str, out: Path) -> None:
    sleep = time.sleep
    progress.release = lambda: None
    uploading.PER_COMMIT = 2  # more commits to be killed in
    time.sleep = lambda seconds: sleep(min(seconds, 0.05))
    upload(out, Hub(repo, HfApi(endpoint=url, token="none"), waits=(0.05,) * 8))


def start(server: FakeHub, out: Path) -> multiprocessing.Process:
    process = CONTEXT.Process(target=run_in_process, args=(server.url, server.repo, out))
    process.start()
    return process


def test_killed_ten_times_at_random(out: Path, server: FakeHub) -> None:
    state, chance, reached = server.state, random.Random(35), set()
    state.fail_every = 3
    for _ in range(10):
        stop = len(state.calls) + chance.randint(1, 45)
        process = start(server, out)
        with state.changed:
            assert state.changed.wait_for(lambda stop=stop: len(state.calls) >= stop, timeout=30)
        time.sleep(chance.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was still at work"
        assert not state.commits or MARKER not in state.files, "no marker before the end"
        reached.add(len(state.commits))
    assert len(reached) > 1, "kills fell between commits"
    process = start(server, out)
    process.join(60)
    assert process.exitcode == 0
    assert_complete(server, out)
    received, commits = state.received, len(state.commits)
    process = start(server, out)
    process.join(60)
    assert process.exitcode == 0 and (state.received, len(state.commits)) == (received, commits)


def test_a_changed_file_withdraws_the_marker_first(out: Path, hub: Hub, server: FakeHub) -> None:
    upload(out, hub)
    first = len(server.state.commits)
    (out / "LICENSE").write_text("be kinder\n")
    done = upload(out, hub)
    assert done.sent == ("LICENSE", MARKER)
    later = [(MARKER in files, files["LICENSE"].data) for _, files in server.state.commits[first:]]
    assert later == [(False, b"be kind\n"), (False, b"be kinder\n"), (True, b"be kinder\n")]


def test_foreign_files_are_refused_or_pruned(out: Path, hub: Hub, server: FakeHub) -> None:
    hub.create(private=False)
    server.state.put("by hand", server.state.files | {"model-00001-of-00099.safetensors": Entry(b"old", True)})
    with pytest.raises(PublishError, match="model-00001-of-00099.safetensors.*--prune"):
        upload(out, hub)
    assert server.state.received == 0
    upload(out, hub, prune=True)
    assert_complete(server, out)


@pytest.mark.parametrize("name", ["model-00003-of-00012.safetensors", "config.json"])
def test_other_bytes_on_the_hub_get_no_marker(
    out: Path, hub: Hub, server: FakeHub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = server.state.put

    def damage(title: str, files: dict[str, Entry]) -> None:
        if name in files:
            files[name] = Entry(files[name].data[:-1] + b"?", files[name].lfs)
        put(title, files)

    monkeypatch.setattr(server.state, "put", damage)
    with pytest.raises(PublishError, match=rf"{name}: the hub holds \w+, here is"):
        upload(out, hub)
    assert all(MARKER not in files for _, files in server.state.commits)


def test_somebody_else_commits_between_comparison_and_marker(
    out: Path, hub: Hub, server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Hub.commit

    def raced(self: Hub, message: str, *arguments: object, **options: object) -> None:
        if "complete" in message and "parent" in options:
            server.state.put("by hand", server.state.files | {"README.md": Entry(b"mine", False)})
        commit(self, message, *arguments, **options)

    monkeypatch.setattr(Hub, "commit", raced)
    with pytest.raises(PublishError, match="somebody else changed the repository"):
        upload(out, hub)
    assert MARKER not in server.state.files


def test_caches_and_earlier_markers_stay_here(out: Path, hub: Hub, server: FakeHub) -> None:
    (out / ".cache/huggingface").mkdir(parents=True)
    (out / ".cache/huggingface/state.json").write_text("{}")
    (out / ".DS_Store").write_text("x")
    (out / MARKER).write_text("an old one")
    upload(out, hub)
    shutil.rmtree(out / ".cache")
    (out / ".DS_Store").unlink()
    (out / MARKER).unlink()
    assert_complete(server, out)


def test_resume_hashes_nothing_again(out: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(out, hub)
    hashed = []
    monkeypatch.setattr("keys35.publish.files.sha256_file", lambda path: hashed.append(path) or sha256_file(path))
    upload(out, hub)
    assert hashed == []
    (out / "LICENSE").write_text("be kind!\n")
    upload(out, hub)
    assert [path.name for path in hashed] == ["LICENSE"]


@pytest.mark.parametrize(("status", "words"), [("401", "log in"), ("403", "write access"), ("404", "check the name")])
def test_refusals_are_not_repeated(
    out: Path, hub: Hub, server: FakeHub, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.state, "enter", lambda method, path: server.state.calls.append((method, path, "")) or "")
    monkeypatch.setattr("fake_hub.ROUTES", [("GET POST", "/.*", lambda *_: (int(status), {"error": "no"}))])
    with pytest.raises(PublishError, match=words):
        upload(out, hub)
    paths = [path for _, path, _ in server.state.calls]
    assert len(paths) == len(set(paths)), "one try each"


def test_a_hub_that_stays_away(out: Path) -> None:
    hub = Hub("someone/tiny", HfApi(endpoint="http://127.0.0.1:9", token="none"), waits=(0.01, 0.01))
    with pytest.raises(PublishError, match="run the same command again"):
        upload(out, hub)


def test_invalid_front_matter(out: Path, hub: Hub) -> None:
    (out / "README.md").write_text("---\nbroken: [\n---\n")
    with pytest.raises(PublishError, match="README.md"):
        upload(out, hub)


def test_killed_before_the_marker(out: Path, hub: Hub, server: FakeHub) -> None:
    """All files are on the hub, the marker is not: only that is left to do."""
    upload(out, hub)
    files = {name: entry for name, entry in server.state.files.items() if name != MARKER}
    server.state.put("killed here", files)
    assert upload(out, hub).sent == (MARKER,)
    assert MARKER in server.state.files
