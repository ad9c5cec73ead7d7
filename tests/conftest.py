"""What all rooms' tests share: one whole run on a small model, whose artefacts many tests look at."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from small import small_recipe, small_source

from keys35.progress import Progress
from keys35.recipe import Recipe
from keys35.stages.job import open_job
from keys35.stages.pipeline import run


@dataclass(frozen=True)
class Finished:
    source: Path
    work: Path
    out: Path
    recipe: Recipe
    result: dict


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_source(tmp_path_factory.mktemp("small") / "source")


@pytest.fixture(scope="session")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    root = tmp_path_factory.mktemp("finished")
    recipe = small_recipe()
    with open_job(source, recipe, root / "work") as job:
        result = run(job, root / "out", Progress(job.work), tp=4)
    return Finished(source, root / "work", root / "out", recipe, result)


@pytest.fixture
def small() -> Recipe:
    return small_recipe()
