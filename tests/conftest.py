"""What all rooms' tests share: one whole run on a small model, whose artefacts many tests look at."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from small import small_recipe, small_source
from tiny import make_tiny, tiny_source

from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.stages.assemble import assemble
from keys35.stages.job import open_job
from keys35.stages.pipeline import run
from keys35.stages.workers import Workers

LONG = ("test_kill", "test_profiles", "test_workers", "test_cuda_sources", "test_generality")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no process is left alone with one of them at the end."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@dataclass(frozen=True)
class Finished:
    source: Path
    work: Path
    out: Path
    recipe: Recipe
    result: dict


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes of this run have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def source(shared: Path) -> Path:
    with FileLock(shared / "source.lock"):
        root = shared / "small-source"
        return root if root.exists() else small_source(root)


@pytest.fixture(scope="session")
def finished(source: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished job of this process alone; what another process has encoded is not encoded again."""
    root, recipe, first = tmp_path_factory.mktemp("finished"), small_recipe(), shared / "finished-first"
    with FileLock(shared / "finished.lock"):
        if not (first / "result.json").exists():
            with open_job(source, recipe, first / "work") as job:
                result = run(job, first / "out", Progress(job.work), tp=2)
            (first / "result.json").write_text(json.dumps(result))
        shutil.copytree(first, root, dirs_exist_ok=True)
    with open_job(source, recipe, root / "work") as job:
        assemble(job, root / "out", Progress())  # so that the receipts are those of this folder
    return Finished(source, root / "work", root / "out", recipe, json.loads((first / "result.json").read_text()))


@dataclass(frozen=True)
class Alone:
    source: Path
    work: Path
    out: Path


@pytest.fixture(scope="session")
def tiny(shared: Path) -> Alone:
    """The tiny model's checkpoint as one process makes it, assembled and not validated; tests only look at it."""
    root = shared / "tiny"
    with FileLock(shared / "tiny.lock"):
        if not (root / "out").exists():
            make_tiny(tiny_source(root / "source"), root, Workers(1))
    return Alone(root / "source", root / "work", root / "out")


@pytest.fixture
def small() -> Recipe:
    return small_recipe()
