"""The published JSON schemas of the report files, by file name, and what a file lacks to be read."""

import json
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

from keys35.errors import ContractError
from keys35.files.forms import misfit, read_formed
from keys35.report.measured import MAKING, MEASUREMENTS

__all__ = ["QUALITY", "REPORT", "SCHEMAS", "load_schema", "misfit", "read_report"]

REPORT, QUALITY = "KEYS35_ASSEMBLY_REPORT.json", "KEYS35_QUALITY.json"
SCHEMAS = {REPORT: "assembly_report", QUALITY: "quality", MEASUREMENTS: "measurements", MAKING: "making"}


def load_schema(file: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a report file, such as KEYS35_QUALITY.json; KeyError for any other name."""
    text = files("keys35.report").joinpath(f"{SCHEMAS[file]}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)


def read_report(path: Path, remedy: str) -> dict[str, Any]:
    """A report file with everything in it that its readers need; ContractError with `remedy` for any other."""
    value = read_formed(path, load_schema(path.name), ContractError, remedy)
    if fault := _uneven(value) if path.name == MEASUREMENTS else "":
        raise ContractError(f"{path}: {fault}; {remedy}")
    return value


def _uneven(measured: dict[str, Any]) -> str:
    """What no schema can say of measurements: lists that go together are of one length, layers and means are numbers.

    Experts of a layer may be missing from some: a prediction encodes a sample of them.
    """
    names = [*measured["layers"], *measured["dense"]]
    if odd := [name for name in names if not name.isdecimal()]:
        return f"{odd[0]!r} is no layer"
    for layer, entry in measured["layers"].items():
        rows = [row for key in ("proxy_error", "cost") for row in entry.get(key, ())]
        if any(len(row) != len(entry["widths"]) for row in rows) or not entry["fit_rows"]:
            return f"layer {layer} lacks some of its experts' numbers, or has too many"
        if len(entry.get("chosen", ())) != len(entry.get("cost", ())) and entry.keys() >= {"chosen", "cost"}:
            return f"layer {layer} has costs of {len(entry['cost'])} experts and widths of {len(entry['chosen'])}"
    return next((f"the set {name!r} has a mean of {entry['mean']!r} bits" for name, entry in measured["sets"].items()
                 if not _is_number(entry["mean"])), "")


def _is_number(text: str) -> bool:
    try:
        return bool(Fraction(text) >= 0)
    except (ValueError, ZeroDivisionError):
        return False
