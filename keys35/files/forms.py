"""JSON files as their readers need them: a file may be whole, and hold something else."""

from pathlib import Path
from typing import Any

from keys35.errors import Keys35Error, ResumeError
from keys35.files.atomic import REDO, read_json

TYPES = {"object": dict, "array": list, "string": str, "null": type(None), "integer": int, "number": int | float}
OBJECT = {"type": "object"}


def read_formed(
    path: Path, form: dict[str, Any], error: type[Keys35Error] = ResumeError, remedy: str = REDO
) -> Any:
    """A JSON file with everything in it that its readers need; `error` with `remedy` for any other.

    form: a JSON schema, of which `misfit` knows a part.
    """
    value = read_json(path, error, remedy)
    if fault := misfit(value, form):
        raise error(f"{path}: {fault}; {remedy}")
    return value


def misfit(value: Any, schema: dict[str, Any], place: str = "it") -> str:
    """The first part of a JSON value that its readers would stumble over: a key that is missing, another type or
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


def _parts(value: Any, schema: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """(name, part, its schema) of an object or array."""
    if isinstance(value, list):
        return [(f"entry {number}", part, schema.get("items", {})) for number, part in enumerate(value)]
    if not isinstance(value, dict):
        return []
    others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    other = next((form for form in others if isinstance(form, dict)), {})
    return [(repr(key), part, schema.get("properties", {}).get(key, other)) for key, part in value.items()]
