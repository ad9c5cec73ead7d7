"""The published JSON schemas of the report files, by file name, and what a file lacks to be read."""

import json
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

from keys35.errors import ContractError
from keys35.files.atomic import read_json
from keys35.report.measured import MAKING, MEASUREMENTS

REPORT, QUALITY = "KEYS35_ASSEMBLY_REPORT.json", "KEYS35_QUALITY.json"
SCHEMAS = {REPORT: "assembly_report", QUALITY: "quality", MEASUREMENTS: "measurements", MAKING: "making"}
TYPES = {"object": dict, "array": list, "string": str, "null": type(None), "integer": int, "number": int | float}


def load_schema(file: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a report file, such as KEYS35_QUALITY.json; KeyError for any other name."""
    text = files("keys35.report").joinpath(f"{SCHEMAS[file]}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)


def read_report(path: Path, remedy: str) -> dict[str, Any]:
    """A report file with everything in it that its readers need; ContractError with `remedy` for any other."""
    value = read_json(path, ContractError, remedy)
    if fault := misfit(value, load_schema(path.name)) or (_uneven(value) if path.name == MEASUREMENTS else ""):
        raise ContractError(f"{path}: {fault}; {remedy}")
    return value


def misfit(value: Any, schema: dict[str, Any], place: str = "it") -> str:
    """The first part of a report file that its readers would stumble over: a key that is missing, another type or
    format, too small a number; "" if there is none. Names and texts may be anything, and keys of a later version may be
    there.
    """
    if ways := schema.get("anyOf") or schema.get("oneOf"):
        found = [misfit(value, one, place) for one in ways]
        return "" if "" in found else found[0]
    wanted = schema.get("type")
    if wanted and (isinstance(value, bool) or not isinstance(value, TYPES[wanted])):
        return f"{place} is no {wanted}"
    if "const" in schema and value != schema["const"]:
        return f"{place} is {value!r}, not {schema['const']!r}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"{place} is {value}"
    if missing := [key for key in schema.get("required", ()) if key not in value]:
        return f"{place} lacks {', '.join(missing)}"
    return next(filter(None, (misfit(part, form, name) for name, part, form in _parts(value, schema))), "")


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


def _parts(value: Any, schema: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """(name, part, its schema) of an object or array."""
    if isinstance(value, list):
        return [(f"entry {number}", part, schema.get("items", {})) for number, part in enumerate(value)]
    if not isinstance(value, dict):
        return []
    others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    other = next((form for form in others if isinstance(form, dict)), {})
    return [(repr(key), part, schema.get("properties", {}).get(key, other)) for key, part in value.items()]
