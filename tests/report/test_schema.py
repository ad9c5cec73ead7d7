"""The published schemas hold for what a run writes, and refuse what no run may write."""

import json

import jsonschema
import pytest

from keys35.report.card import write_card
from keys35.report.html import write_making, write_report
from keys35.report.machine import machine
from keys35.report.schema import SCHEMAS, load_schema, misfit


def fits(folder, file):
    jsonschema.Draft202012Validator(load_schema(file)).validate(json.loads((folder / file).read_text()))


@pytest.mark.parametrize("file", SCHEMAS)
def test_schemas_are_schemas(file):
    jsonschema.Draft202012Validator.check_schema(load_schema(file))


def test_a_finished_run_fits(finished, tmp_path):
    import shutil

    out = shutil.copytree(finished.out, tmp_path / "out")
    write_making(out, finished.work, "owner/model")
    write_report(out, finished.work)
    write_card(out)
    for file in SCHEMAS:
        fits(out, file)
        described = load_schema(file)["properties"]
        unknown = set(json.loads((out / file).read_text())) - set(described)
        assert not unknown, f"{file} has keys that its published schema does not describe: {unknown}"


def test_made_up_files_fit(out):
    for file in ("KEYS35_ASSEMBLY_REPORT.json", "KEYS35_QUALITY.json", "KEYS35_MEASUREMENTS.json"):
        fits(out, file)


def test_sets_of_half_rates_fit(out):
    """The published schema refused the measurements of a recipe with a width of 2.5, as it does not the report."""
    measured = json.loads((out / "KEYS35_MEASUREMENTS.json").read_text())
    measured["sets"]["allocation"]["counts"] = {"2.5": 6, "3": 18}
    jsonschema.Draft202012Validator(load_schema("KEYS35_MEASUREMENTS.json")).validate(measured)


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("KEYS35_ASSEMBLY_REPORT.json", ("routed_mean_bits_exact",), "2.75"),
        ("KEYS35_ASSEMBLY_REPORT.json", ("widths_total", "9"), 1),
        ("KEYS35_ASSEMBLY_REPORT.json", ("shards", 0, "sha256"), "ab"),
        ("KEYS35_ASSEMBLY_REPORT.json", ("shards", 0, "file"), "/root/model.safetensors"),
        ("KEYS35_ASSEMBLY_REPORT.json", ("proxy_errors", 0, "role"), "router"),
        ("KEYS35_ASSEMBLY_REPORT.json", ("format",), "keys34"),
        ("KEYS35_QUALITY.json", ("metrics", "top1"), 1.2),
        ("KEYS35_QUALITY.json", ("metrics", "seconds"), 3),
        ("KEYS35_QUALITY.json", ("ranks", 0, "host"), "box"),
        ("KEYS35_QUALITY.json", ("noise_floor",), None),
        ("KEYS35_MEASUREMENTS.json", ("time",), "2026-01-01"),
        ("KEYS35_MEASUREMENTS.json", ("layers", "one"), {}),
    ],
)
def test_schemas_refuse(out, file, path, value):
    document = json.loads((out / file).read_text())
    *way, last = path
    place = document
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(load_schema(file)).validate(document)


@pytest.mark.parametrize("file", ["KEYS35_ASSEMBLY_REPORT.json", "KEYS35_QUALITY.json"])
def test_every_required_key_is_missed(out, file):
    whole, schema = json.loads((out / file).read_text()), load_schema(file)
    for key in schema["required"]:
        with pytest.raises(jsonschema.ValidationError, match=key):
            jsonschema.Draft202012Validator(schema).validate({k: v for k, v in whole.items() if k != key})


STUMBLED_OVER = ("type", "minimum", "required", "const", "oneOf", "anyOf")


@pytest.mark.parametrize("file", ["KEYS35_ASSEMBLY_REPORT.json", "KEYS35_QUALITY.json", "KEYS35_MEASUREMENTS.json"])
def test_what_readers_need_is_what_the_schema_requires(out, file):
    """Every required key and every type, against the library that knows all of JSON schema."""
    whole, schema = json.loads((out / file).read_text()), load_schema(file)
    known = jsonschema.Draft202012Validator(schema)
    assert misfit(whole, schema) == "" and misfit(whole | {"of_a_later_version": 1}, schema) == ""

    def spoil(place):
        for key in list(place if isinstance(place, dict) else range(len(place))):
            kept = place[key]
            for other in (None, True, "text", -1, [], {}):
                place[key] = other
                if any(error.validator in STUMBLED_OVER for error in known.iter_errors(whole)):
                    assert misfit(whole, schema), f"{key} is {other}"
            if isinstance(place, dict):
                del place[key]
                if any(error.validator == "required" for error in known.iter_errors(whole)):
                    assert misfit(whole, schema), f"{key} is missing"
            place[key] = kept
            if isinstance(kept, (dict, list)) and len(kept) < 40:
                spoil(kept)

    spoil(whole)


def test_a_machine_has_no_name():
    import platform

    found = machine()
    assert found["cores"] >= 1 and found["memory_bytes"] > 1 << 28
    assert platform.node() not in json.dumps(found) or len(platform.node()) < 4
