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


def test_a_work_directory_of_an_earlier_version(finished, tmp_path):
    work = shutil.copytree(finished.work, tmp_path / "work")
    receipt = work / "receipts/measure/sensitivity.json"
    stored = json.loads(receipt.read_text())
    del stored["data"]["beyond"]
    receipt.write_text(json.dumps(stored))
    done = report(work)
    assert done.exit_code == 0, done.output


def test_a_publisher_adds_time_and_source(finished, tmp_path):
    out = shutil.copytree(finished.out, tmp_path / "out")
    done = report(out, "--work", finished.work, "--base-model", "owner/model")
    assert done.exit_code == 0, done.output
    making = json.loads((out / "KEYS35_MAKING.json").read_text())
    assert making["base_model"] == "owner/model" and making["seconds"]["expert encoding and judging"] > 0
    text = (out / "README.md").read_text()
    assert "Time, wall clock" in text and "base_model: owner/model" in text
    assert report(out).exit_code == 0 and (out / "README.md").read_text() == text


def test_a_validation_says_that_the_page_shows_other_figures(finished, tmp_path):
    """They stayed as they were, without a word, and went to the hub so."""
    out = shutil.copytree(finished.out, tmp_path / "out")
    words = ["validate", str(out), "--reference", str(finished.source), "--tp", "1"]
    for told in (True, False):  # the second time nothing changes
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and ("`keys35 report" in done.output) == told, done.output


def test_what_is_of_a_checkpoint_is_not_ignored_for_a_work_directory(tiny):
    for option in (("--base-model", "owner/model"), ("--work", tiny.work)):
        done = report(tiny.work, *option)
        assert done.exit_code == 2 and "is a work directory" in " ".join(done.output.replace("│", "").split())


def test_neither(tmp_path):
    done = report(tmp_path, "--base-model", "owner/model")
    assert isinstance(done.exception, ContractError) and "give a work directory" in str(done.exception)
    assert str(done.exception).count(str(tmp_path)) == 1, "the path is said once"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("file", "way", "words"), [
    ("KEYS35_ASSEMBLY_REPORT.json", ("warnings",), "it lacks warnings"),
    ("KEYS35_ASSEMBLY_REPORT.json", ("recipe", "calibration"), "'recipe' lacks calibration"),
    ("KEYS35_QUALITY.json", ("noise_floor",), "it lacks noise_floor"),
    ("KEYS35_QUALITY.json", ("ranks", 1, "sharded"), "entry 1 lacks sharded"),
    ("KEYS35_MEASUREMENTS.json", ("sets",), "it lacks sets"),
    ("KEYS35_MEASUREMENTS.json", ("layers", "1", "fit_rows"), "'1' lacks fit_rows"),
])
def test_a_report_file_that_lacks_something_is_refused_by_name(out, file, way, words):
    place = document = json.loads((out / file).read_text())
    for step in way[:-1]:
        place = place[step]
    del place[way[-1]]
    (out / file).write_text(json.dumps(document))
    done = report(out)
    assert isinstance(done.exception, ContractError) and words in str(done.exception)
    assert file in str(done.exception)


@pytest.mark.parametrize("words", ["Example: keys35 report OUT", "--base-model", "--work"])
def test_help(words):
    assert words in CliRunner().invoke(app, ["report", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
