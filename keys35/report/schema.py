"""The published JSON schemas of the report files, by file name."""

import json
from importlib.resources import files
from typing import Any

from keys35.report.facts import QUALITY, REPORT
from keys35.report.measured import MAKING, MEASUREMENTS

SCHEMAS = {REPORT: "assembly_report", QUALITY: "quality", MEASUREMENTS: "measurements", MAKING: "making"}


def load_schema(file: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a report file, such as KEYS35_QUALITY.json; KeyError for any other name."""
    text = files("keys35.report").joinpath(f"{SCHEMAS[file]}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)
