"""A finished checkpoint of twelve shards, a hub on loopback, and no waiting."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read by huggingface_hub when it is imported: the loopback hub speaks LFS, and nothing may leave this machine.
os.environ.update(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

from builders import Output, random_source  # noqa: E402
from fake_hub import FakeHub  # noqa: E402
from huggingface_hub import HfApi  # noqa: E402

from keys35.publish.hub import Hub  # noqa: E402

WIDTHS = {1: [2, 3, 3, 3], 2: [2, 2, 3, 4]}
CARD = """---
license: mit
---
[report](KEYS35_ASSEMBLY_REPORT.json) and [the licence](./LICENSE#terms), [web](https://example.org/work/page)
"""


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_source(tmp_path_factory.mktemp("publish") / "source", shards=6)


@pytest.fixture(scope="session")
def finished_out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = Output(source, WIDTHS, shards=12).write(tmp_path_factory.mktemp("publish") / "out")
    (out / "README.md").write_text(CARD)
    return out


@pytest.fixture
def out(finished_out: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished_out, tmp_path / "out")


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub() as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither huggingface_hub's pauses of seconds nor a garbage collection per file, which is for big models."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.005)))
    monkeypatch.setattr("keys35.progress.release", lambda: None)


@pytest.fixture
def hub(server: FakeHub) -> Hub:
    return Hub(server.repo, HfApi(endpoint=server.url, token="none"), waits=(0.005,) * 8)
