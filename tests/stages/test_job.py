"""A job is the same from wherever it is gone on with."""

import json

import pytest
from small import small_recipe, small_source

from keys35.calibration.text import load_text_set
from keys35.errors import RecipeError, ResumeError
from keys35.files.ledger import WHEREABOUTS
from keys35.stages.job import attach_job, open_job, resume_job


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_source(tmp_path_factory.mktemp("source") / "model")


def test_a_text_set_of_a_users_own_is_found_from_other_folders(source, tmp_path, monkeypatch):
    """A recipe may name it relative to where the command runs; workers and later commands may run elsewhere."""
    home, other, root = tmp_path / "home", tmp_path / "other", tmp_path / "work"
    for folder, words in (home, "mine"), (other, "not mine"):
        folder.mkdir()
        (folder / "own.txt").write_text(words)
        (folder / "own.toml").write_text(
            'version = 1\n[[domain]]\nname = "own"\nshare = 1\nfiles = ["own.txt"]\ndocuments = "line"\n')
    recipe = small_recipe(calibration={"set": "own.toml"})
    monkeypatch.chdir(home)
    with open_job(source, recipe, root) as job:
        text = job.text
    monkeypatch.chdir(other)
    assert attach_job(root).text == text
    for _ in range(2):  # going on from elsewhere does not move it there
        with resume_job(root) as job:
            assert job.text == text and load_text_set(job.recipe.calibration.set, job.folder) == text
    assert "home" not in json.dumps(job.recipe.model_dump(mode="json"))  # which is published

    home.rename(tmp_path / "moved")
    (other / "own.txt").write_text("mine")
    with resume_job(root) as job:  # gone from there: one of the same bytes in the folder at hand will do
        assert job.text.digest == text.digest
    (other / "own.toml").unlink()
    with pytest.raises(RecipeError, match=r"no calibration set 'own\.toml'"), resume_job(root):
        pass


def test_jobs_of_versions_that_did_not_keep_the_folder_go_on(source, tmp_path):
    with open_job(source, small_recipe(), tmp_path / "work"):
        pass
    path = tmp_path / "work" / WHEREABOUTS
    facts = json.loads(path.read_text())
    del facts["folder"]
    path.write_text(json.dumps(facts))
    assert attach_job(tmp_path / "work").text.name == "demo"
    for broken in ([], {"recipe": facts["recipe"]}, facts | {"source": 3}):
        path.write_text(json.dumps(broken))
        with pytest.raises(ResumeError, match="whereabouts.json: .*; begin with `keys35 measure SOURCE"):
            attach_job(tmp_path / "work")
        with pytest.raises(ResumeError, match="whereabouts.json"), resume_job(tmp_path / "work"):
            pass
