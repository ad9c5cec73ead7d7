"""`keys35 report` on a work directory, on a checkpoint, and on neither."""

import json
import shutil

import pytest
from small import digest
from tiny import tiny_recipe
from typer.testing import CliRunner

from keys35.cli import app
from keys35.errors import ContractError
from keys35.progress import Progress
from keys35.report.facts import REPORT
from keys35.stages.job import open_job
from keys35.stages.measure import measure


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


def test_a_work_directory_whose_output_was_another_jobs_later(finished, tmp_path):
    """Its page had the other's name, widths and quality over its own measurements."""
    out, work = shutil.copytree(finished.out, tmp_path / "out"), shutil.copytree(finished.work, tmp_path / "work")
    for receipt in (work / "receipts/assemble").glob("*.json"):
        stored = json.loads(receipt.read_text())
        stored["data"]["out"] = str(out)
        receipt.write_text(json.dumps(stored))
    assert report(work).exit_code == 0 and "Provenance" in (work / "report.html").read_text()
    stored = json.loads((out / REPORT).read_text())
    stored["recipe"] |= {"name": "another", "seed": 99}
    (out / REPORT).write_text(json.dumps(stored))
    done, page = report(work), (work / "report.html")
    assert done.exit_code == 0, done.output
    assert "another" not in page.read_text() and "Provenance" not in page.read_text()


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
    ("KEYS35_QUALITY.json", ("metrics", "mtp", "acceptance_reference"), "'mtp' lacks acceptance_reference"),
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


def test_a_work_directory_with_a_unit_to_be_redone(finished, tmp_path):
    """Its layer's experts have widths, and costs but for the unit's: a traceback where they were paired."""
    work = shutil.copytree(finished.work, tmp_path / "work")
    (work / "experts/layer-001/0002-k3.safetensors").unlink()
    done = report(work)
    assert done.exit_code == 0, done.output
    assert "KL that 3 instead of 2 bits save" not in (work / "report.html").read_text(), "its only MoE layer"


def test_a_predicted_measurement_that_has_encoded_nothing_yet(tiny, tmp_path):
    work = tmp_path / "work"
    experts = {"widths": [3, 4], "bits": 3.25, "group": 2, "measure": "predicted", "sample": 4}
    with open_job(tiny.source, tiny_recipe(experts=experts), work) as job:
        measure(job, Progress(job.work))
    for receipt in (work / "receipts/experts/layer-002").iterdir():  # expert 2 is the layer's sample
        receipt.unlink() if receipt.stem != "0000" else None
    done = report(work)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("way", "value", "words"), [
    (("layers", "1", "fit_rows"), [], "layer 1 lacks some"),
    (("layers", "1", "widths"), [2, 3, 4, 5], "layer 1 lacks some"),
    (("layers", "1", "proxy_error", 0), [], "layer 1 lacks some"),
    (("layers", "1", "cost", 0), [0.1, 0.1], "layer 1 lacks some"),
    (("layers", "1", "cost"), [[0.1, 0.1, 0.1]], "layer 1 has costs of 1 experts and widths of 8"),
    (("layers", "1", "chosen"), [], "layer 1 has costs of 8 experts and widths of 0"),
    (("dense", "first"), {"linears": 1, "mean": 1, "max": 1}, "'first' is no layer"),
    (("sets", "allocation", "mean"), "1/0", "the set 'allocation' has a mean of '1/0' bits"),
])
def test_measurements_that_disagree_are_refused_by_name(out, way, value, words):
    """Each was a traceback: one list is drawn over another."""
    place = document = json.loads((out / "KEYS35_MEASUREMENTS.json").read_text())
    for step in way[:-1]:
        place = place[step]
    place[way[-1]] = value
    (out / "KEYS35_MEASUREMENTS.json").write_text(json.dumps(document))
    done = report(out)
    assert isinstance(done.exception, ContractError) and words in str(done.exception)


@pytest.mark.parametrize(("way", "value"), [
    (("quantization_config.json", "expert_bits", "1", 0), "two"),
    (("quantization_config.json", "expert_bits", "1"), []),
    (("quantization_config.json", "expert_bits", "1"), None),
    (("quantization_config.json", "tensor_storage", "model.layers.1.self_attn.q_a_proj", "stored_tensors",
      "model.layers.1.self_attn.q_a_proj.trellis", "shape"), [0, 8, 80]),
])
def test_facts_that_were_mended_by_hand_are_refused(out, way, value):
    file = out / way[0]
    place = document = json.loads(file.read_text())
    for step in way[1:-1]:
        place = place[step]
    place[way[-1]] = value
    file.write_text(json.dumps(document))
    assert isinstance(report(out).exception, ContractError)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_drawn_at_the_edge(out, value):
    """JSON of ours may hold them; the axes of a picture cannot."""
    document = json.loads((out / "KEYS35_MEASUREMENTS.json").read_text())
    layer = document["layers"]["1"]
    layer["cost"][0][0] = layer["proxy_error"][0][0] = document["dense"]["1"]["mean"] = value
    document["sets"]["random-0"]["predicted_kl"] = value
    (out / "KEYS35_MEASUREMENTS.json").write_text(json.dumps(document))
    done = report(out)
    assert done.exit_code == 0, done.output


def test_a_fingerprint_without_a_size_is_of_a_source_of_unknown_size(out):
    document = json.loads((out / "KEYS35_ASSEMBLY_REPORT.json").read_text())
    document["source_fingerprint"] = {"model.safetensors": "some bytes, header ab"}
    (out / "KEYS35_ASSEMBLY_REPORT.json").write_text(json.dumps(document))
    done = report(out)
    assert done.exit_code == 0 and "the BF16 source has" not in (out / "KEYS35_REPORT.html").read_text()


@pytest.mark.parametrize("words", ["Example: keys35 report OUT", "--base-model", "--work"])
def test_help(words):
    assert words in CliRunner().invoke(app, ["report", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
