"""Variants of a recipe: lists of them, and what each changes."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keys35.errors import RecipeError
from keys35.recipe import Recipe, dotted
from keys35.stages.choice import EXPERTS

SHIPPED = "ablations.toml"
ALLOCATION, UNSEEN = "allocation", "unseen"
SETS = frozenset({ALLOCATION, "random", "equal-per-layer", "error-only", "uniform", "per-expert", "by-energy",
                  EXPERTS, UNSEEN})


@dataclass(frozen=True)
class Variant:
    """A named change of a recipe: dotted keys to values, beside `base`, which all of a list have.

    sets: what is scored, "allocation" among it; all if empty. "experts": widths by experts' costs even where the recipe
    falls back; "unseen": see `ablation_facts.unseen`. shipped: one of ours, left out where a recipe cannot have it.
    """

    group: str
    name: str
    changes: dict[str, Any]
    sets: tuple[str, ...]
    base: dict[str, Any] = field(default_factory=dict)
    shipped: bool = False

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe so changed; raises RecipeError as `vary` does."""
        return vary(vary(recipe, self.base), self.changes)


def load_variants(path: Path | None, only: Sequence[str] = ()) -> list[Variant]:
    """The variants of a TOML file, the shipped ones by default; raises RecipeError for a bad entry or unknown name."""
    source = path or Path(str(files("keys35"))) / SHIPPED
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8-sig"))  # some editors leave a mark
        if not isinstance(base := raw.get("base", {}), dict):
            raise TypeError("base is a table of changes")
        found = [replace(_variant(entry), base=base, shipped=path is None) for entry in raw["variant"]]
        if len({(v.group, v.name) for v in found}) < len(found):
            raise ValueError("two variants of one group have one name, and would share a row")
    except (OSError, ValueError, KeyError, TypeError) as error:  # TOML's and UTF-8's are ValueErrors
        why = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{source}: not a list of [[variant]] with group, name and set: {why}") from None
    unknown = sorted(set(only) - {v.name for v in found} - {v.group for v in found})
    if unknown:
        raise RecipeError(f"{source} has no variant {', '.join(unknown)}: it has {'; '.join(v.name for v in found)}")
    return [v for v in found if not only or {v.name, v.group} & set(only)]


def _variant(entry: Any) -> Variant:
    if not isinstance(entry, dict):
        raise TypeError(entry)
    if unknown := set(entry) - {"group", "name", "set", "sets"}:
        raise ValueError(f"{entry}: unknown key {', '.join(sorted(unknown))}")
    changes, sets = entry.get("set", {}), entry.get("sets", [])
    words = [entry["group"], entry["name"], *(sets if isinstance(sets, list) else [None])]
    if not isinstance(changes, dict) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"{entry}: group and name are texts, set is a table, sets a list of texts")
    if sets and ALLOCATION not in sets or not {kind(name) for name in sets} <= SETS:
        raise ValueError(f"{entry}: sets may be {', '.join(sorted(SETS))}, and must be allocation, too")
    return Variant(entry["group"], entry["name"], changes, tuple(sets))


def vary(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with dotted keys changed; raises RecipeError for a key or value that recipes do not have.

    TOML makes tables of dotted keys without quotes: those change the keys they name and no others, too.
    """
    values = recipe.model_dump()
    for key, value in dotted(changes):
        *sections, leaf = key.split(".")
        part = values
        for section in sections:
            if not isinstance(part.get(section), dict):
                part[section] = {}  # which the recipe refuses by name
            part = part[section]
        part[leaf] = value
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        place, words = (error.errors()[0][key] for key in ("loc", "msg"))
        raise RecipeError(f"{changes}: {'.'.join(map(str, place))}: {words.removeprefix('Value error, ')}") from None


def kind(name: str) -> str:
    """What kind of set a numbered one is."""
    return name.rstrip("0123456789").rstrip("-")
