"""The two commands as a user meets them, against the loopback hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Output
from fake_hub import FakeHub
from test_upload import assert_complete
from typer.testing import CliRunner

from keys35.cli import app
from keys35.errors import PublishError
from keys35.publish.hub import Hub
from keys35.publish.upload import upload


def keys35(server: FakeHub, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200", "HF_ENDPOINT": server.url, "HF_TOKEN": "none"}
    return subprocess.run([sys.executable, "-m", "keys35.cli", *map(str, arguments)],
                          capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def few(source: Path, tmp_path: Path) -> Path:
    return Output(source, {1: [2, 3, 3, 3], 2: [2, 2, 3, 4]}, shards=2).write(tmp_path / "few")


def test_upload_as_a_user(few: Path, server: FakeHub) -> None:
    done = keys35(server, "upload", few, server.repo, "--private")
    assert done.returncode == 0, done
    assert f"complete {server.repo} at {server.state.head}: 9 files" in done.stdout
    assert "upload 9/9" in done.stdout and done.stderr == ""
    assert_complete(server, few)


def test_fetch_what_was_uploaded(few: Path, hub: Hub, server: FakeHub, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    upload(few, hub)
    monkeypatch.setattr(Hub, "connect", lambda repo: hub)
    done = CliRunner().invoke(app, ["fetch", server.repo, "--to", str(tmp_path / "to")])
    assert done.exit_code == 0, done
    assert f"{server.repo} at {server.state.head}" in done.stdout and "verified" in done.stdout
    names = {path.name for path in (tmp_path / "to").iterdir() if path.is_file()}
    assert names - {path.name for path in few.iterdir()} == {"KEYS35_UPLOAD_COMPLETE.json"}


def test_a_refusal_sends_nothing(few: Path, server: FakeHub) -> None:
    (few / "notes.md").write_text("see /home/alice/notes")
    done = keys35(server, "upload", few, server.repo)
    assert done.returncode == PublishError.exit_code == 11
    assert "notes.md, line 1: a home directory" in done.stderr and "Traceback" not in done.stderr
    assert server.state.calls == []


def test_dry_run_and_help(few: Path, server: FakeHub) -> None:
    done = CliRunner().invoke(app, ["upload", str(few), server.repo, "--dry-run"])
    assert done.exit_code == 0 and "9 files" in done.stdout and server.state.calls == []
    for command in ("upload", "fetch"):
        assert f"Example: keys35 {command} " in CliRunner().invoke(app, [command, "--help"]).stdout
