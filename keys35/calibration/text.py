"""Calibration sets: which files, cut into which documents, in which proportion by domain."""

import hashlib
import importlib.util
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from keys35.errors import Keys35Error, RecipeError
from keys35.recipe import resource_dir

CHUNK_CHARACTERS = 8000
PARTS = ("all", "calibration", "report")
REPORT_SHARE = 8  # one document in eight is the report's, in a set that keeps a part of its files for it


@dataclass(frozen=True)
class Domain:
    """One kind of text: its share of the windows, its files and how they fall into documents.

    part: "all" documents, or those of one side of a split by document: "calibration" (seven of eight) or "report".
    """

    name: str
    share: float
    files: tuple[Path, ...]
    documents: str
    part: str = "all"


@dataclass(frozen=True)
class TextSet:
    """A named, versioned mix of domains; `digest` covers its definition and every byte it reads."""

    name: str
    version: int
    domains: tuple[Domain, ...]
    digest: str

    def only(self, names: Sequence[str]) -> "TextSet":
        """The set with some of its domains, or with all for no names; raises RecipeError for a name it lacks."""
        missing = sorted(set(names) - {domain.name for domain in self.domains})
        if missing:
            has = ", ".join(domain.name for domain in self.domains)
            raise RecipeError(f"calibration set '{self.name}' has no domain {', '.join(missing)}: it has {has}")
        return replace(self, domains=tuple(d for d in self.domains if not names or d.name in names))


@dataclass(frozen=True)
class Chat:
    """A document of messages, which the checkpoint's own template makes text of; key: what splits go by."""

    messages: tuple[dict, ...]
    key: str


@dataclass(frozen=True)
class TokenIds:
    """A document of token ids, sealed with the hash of the tokenizer.json that made them; key: what splits go by."""

    ids: tuple[int, ...]
    tokenizer_sha256: str
    file: Path
    key: str


Document = str | Chat | TokenIds


def key_of(document: Document) -> str:
    """What decides on which side of a split a document falls."""
    return document if isinstance(document, str) else document.key


def load_text_set(name: str, folder: Path = Path()) -> TextSet:
    """A set by its shipped name or a TOML path, of `folder` before this one if it is relative.

    Raises RecipeError for a missing set, file or key.
    """
    path = _find_set(name, folder)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin with a byte-order mark
        domains = tuple(_domain(entry, path.parent) for entry in raw["domain"])
        version = int(raw["version"])
    except (tomllib.TOMLDecodeError, KeyError, OverflowError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"  # not its repr, which holds a whole file that is not UTF-8
        raise RecipeError(f"calibration set {path}: {why}; see calibration/demo.toml for the form") from None
    if len({d.name for d in domains}) != len(domains) or not domains:
        raise RecipeError(f"calibration set {path}: needs at least one [[domain]], each with a name of its own")
    digest = hashlib.sha256(path.read_bytes())
    for domain in domains:
        for file in domain.files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return TextSet(path.stem, version, domains, digest.hexdigest())


def documents(domain: Domain) -> Iterator[Document]:
    """The domain's documents in file order, none of them blank, and only those of its part.

    A line of a .jsonl file has "text", "messages" (a chat) or "ids" (tokens, under the "tokenizer_sha256" of that line
    or one before).
    """
    for file in domain.files:
        text = read_utf8(file, RecipeError)
        parts = _json_lines(text, file) if file.suffix.lower() == ".jsonl" else _cut(text, domain.documents)
        yield from (part for part in parts if key_of(part).strip() and _belongs(key_of(part), domain.part))


def read_utf8(file: Path, refusal: type[Keys35Error]) -> str:
    """A text file, whole, without a byte-order mark; raises `refusal` where it is in another encoding."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise refusal(f"{file}: is not UTF-8 ({error.reason} at byte {error.start}); convert it first, say with "
                      "`iconv -f latin1 -t utf-8`") from None


def _belongs(document: str, part: str) -> bool:
    """A document is on the same side of the split wherever it turns up."""
    held_back = hashlib.sha256(document.strip().encode()).digest()[1] % REPORT_SHARE == 0
    return part == "all" or held_back == (part == "report")


def _find_set(name: str, folder: Path) -> Path:
    shipped = resource_dir("calibration_sets", "calibration")
    for path in (folder / name, Path(name), shipped / f"{name}.toml"):
        if path.suffix == ".toml" and path.is_file():
            return path
    names = ", ".join(sorted(p.stem for p in shipped.glob("*.toml")))
    raise RecipeError(f"no calibration set '{name}'. Give a TOML file or one of the shipped names: {names}")


def _domain(entry: dict, base: Path) -> Domain:
    unknown = set(entry) - {"name", "share", "files", "documents", "part"}
    if unknown:
        raise ValueError(f"unknown key {sorted(unknown)} in a [[domain]]")
    part = entry.get("part", "all")
    if part not in PARTS:
        raise ValueError(f"domain {entry['name']}: part must be one of {', '.join(PARTS)}, found {part!r}")
    for key in ("name", "documents"):
        if not isinstance(entry[key], str) or not entry[key]:
            raise ValueError(f"domain {entry['name']}: {key} must be a text, found {entry[key]!r}")
    if not isinstance(entry["files"], list) or not all(isinstance(file, str) for file in entry["files"]):
        raise ValueError(f"domain {entry['name']}: files must be a list of texts, found {entry['files']!r}")
    share = float(entry["share"])
    if not 0 < share < math.inf:
        raise ValueError(f"domain {entry['name']}: share must be above 0 and finite, found {share}")
    return Domain(entry["name"], share, tuple(_locate(f, base) for f in entry["files"]), entry["documents"], part)


def _locate(reference: str, base: Path) -> Path:
    """`demo:` names the bundled text, `exllamav3:` that wheel's text files (found, never imported)."""
    if reference.startswith("demo:"):
        path = Path(str(files("keys35"))) / "demo" / "text" / reference.removeprefix("demo:")
    elif reference.startswith("exllamav3:"):
        spec = importlib.util.find_spec("exllamav3")
        if spec is None or not spec.submodule_search_locations:
            raise RecipeError(f"'{reference}' needs exllamav3's text files: pip install exllamav3")
        root = Path(spec.submodule_search_locations[0]) / "conversion" / "standard_cal_data"
        path = root / reference.removeprefix("exllamav3:")
    else:
        path = base / reference
    if not path.is_file():
        raise RecipeError(f"calibration text '{reference}' is not a file (looked at {path})")
    return path


def _cut(text: str, how: str) -> Iterator[str]:
    if how == "line":
        yield from text.splitlines()
    elif how == "chunk":
        yield from _chunks(text)
    else:
        yield from text.split(how)


def _chunks(text: str) -> Iterator[str]:
    """Runs of whole lines of about CHUNK_CHARACTERS, for text without document marks."""
    run: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        run.append(line)
        size += len(line)
        if size >= CHUNK_CHARACTERS:
            yield "".join(run)
            run, size = [], 0
    yield "".join(run)


def _json_lines(text: str, file: Path) -> Iterator[Document]:
    sealed = None
    for number, line in enumerate(text.split("\n"), 1):  # a JSON text may hold what else `splitlines` ends a line at
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if "tokenizer_sha256" in value:
                sealed = str(value["tokenizer_sha256"])
            if "ids" in value:
                ids = tuple(_token_id(number) for number in value["ids"])
                yield TokenIds(ids, _known(sealed), file, json.dumps(ids))
            elif "messages" in value:
                _text(json.dumps(value["messages"], ensure_ascii=False))
                yield Chat(tuple(dict(message) for message in value["messages"]), json.dumps(value["messages"]))
            elif "text" in value or "tokenizer_sha256" not in value:
                yield _text(value["text"])
        except (KeyError, TypeError, ValueError, RecursionError):  # JSON's own is a ValueError
            raise RecipeError(
                f'{file} line {number}: expected a JSON object with "text", with "messages", or with "ids" after a '
                'line with "tokenizer_sha256"'
            ) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode()  # half of a surrogate pair, which JSON can write, is no text: ValueError
    return value


def _token_id(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _known(sealed: str | None) -> str:
    if sealed is None:
        raise ValueError("no tokenizer_sha256 before ids")
    return sealed
