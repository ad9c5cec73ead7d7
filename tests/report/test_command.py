"""`keys35 report` on a work directory, on a checkpoint, and on neither."""

import json
import shutil

import pytest
from small import digest
from typer.testing import CliRunner

from keys35.cli import app
from keys35.errors import ContractError


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_checkpoint(out):
    done = report(out)
    assert done.exit_code == 0, done.output
    assert {"KEYS35_REPORT.html", "README.md"} <= {path.name for path in out.iterdir()}
    before = digest(out)
    assert report(out).exit_code == 0 and digest(out) == before


def test_a_work_directory(finished, tmp_path):
    work = shutil.copytree(finished.work, tmp_path / "work")
    before = digest(finished.out)
    assert report(work).exit_code == 0
    assert (work / "report.html").is_file() and digest(finished.out) == before


def test_a_publisher_adds_time_and_source(finished, tmp_path):
    out = shutil.copytree(finished.out, tmp_path / "out")
    done = report(out, "--work", finished.work, "--base-model", "owner/model")
    assert done.exit_code == 0, done.output
    making = json.loads((out / "KEYS35_MAKING.json").read_text())
    assert making["base_model"] == "owner/model" and making["seconds"]["expert encoding and judging"] > 0
    text = (out / "README.md").read_text()
    assert "Time, wall clock" in text and "base_model: owner/model" in text
    assert report(out).exit_code == 0 and (out / "README.md").read_text() == text


def test_neither(tmp_path):
    done = report(tmp_path, "--base-model", "owner/model")
    assert isinstance(done.exception, ContractError) and "give a work directory" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["Example: keys35 report OUT", "--base-model", "--work"])
def test_help(words):
    assert words in CliRunner().invoke(app, ["report", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
