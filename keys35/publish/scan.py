"""What must not leave this machine: credentials and local paths, looked for in everything that is text.

A finding names the file, the line and the kind, never the value, so that the refusal itself can be shown around.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keys35.files.headers import read_header

# Literals come first, which lets `re` skip the tens of megabytes of an index at memory speed.
SECRETS = {
    "a hub token": r"hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}",
    "an AWS key id": r"A(?:KIA|SIA)[A-Z0-9]{16}\b",
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY",
    "a GitHub token": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}",
    "a Slack token": r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a Google key": r"AIza[A-Za-z0-9_-]{35}",
    "an API key": r"sk-(?<!\wsk-)[A-Za-z0-9_-]{32,}",
    "a signed web token": r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "a password in a URL": r"://[^/\s:@\"'<>]+:[^/\s:@\"'<>]+@",
    # A name that promises a credential and a value that looks like one: letters and digits, 16 or more.
    "a credential": r"(?i:secret|passw(?:or)?d|credential|(?:api|access|auth|private)[_-]?(?:key|token))[a-z_]*"
                    r"[\"']?\s*[:=]\s*[\"']?(?=[^\s\"']*\d)(?=[^\s\"']*[A-Za-z])[A-Za-z0-9+/_.=-]{16,}",
}
# Not inside a URL or a longer path; the cache of a container image is no folder of ours.
_START = r"(?:(?<![\w./~-])|(?<=file://))"
PATHS = {
    "a home directory": _START + r"/(?:home|Users)/[\w.-]+",
    "root's home directory": _START + r"/root\b(?!/\.cache/huggingface)(?=/|[\s\"',;)]|$)",
    "a work directory": _START + r"/work(?:space)?/[\w.-]+",
    "a Windows home directory": r"\b[A-Za-z]:[\\/]+Users[\\/]+[\w.-]+",
}
# A vocabulary may hold any string, "/home/user" too, and says nothing about this machine.
VOCABULARIES = {"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model"}


def scan_file(path: Path, name: str, local_paths: tuple[str, ...] = ()) -> list[str]:
    """Every credential and local path in a file's text, or in a shard's header, as "name, line 3: what"; sorted.

    `local_paths` are folders of this machine, looked for literally.
    """
    if path.suffix == ".safetensors":
        text = json.dumps(read_header(path).metadata, ensure_ascii=False)
    else:
        text = path.read_bytes().decode(errors="replace").replace("\0", "")  # as in UTF-16, whatever its order
    patterns = {kind: re.compile(pattern) for kind, pattern in SECRETS.items()}
    if Path(name).name not in VOCABULARIES:
        patterns |= {kind: re.compile(pattern) for kind, pattern in PATHS.items()}
        here = [re.escape(folder) for folder in local_paths if folder.count("/") > 1]
        if here:
            patterns["a folder of this machine"] = re.compile(rf"(?:{'|'.join(here)})(?![\w.-])")
    found = {(text.count("\n", 0, match.start()) + 1, kind)
             for kind, pattern in patterns.items() for match in pattern.finditer(text)}
    seen = {kind for _, kind in found}
    if path.suffix == ".json" and "\\" in text:  # escapes such as a \u0068 for an h may hide it
        hidden = "\n".join(_strings(text))
        found |= {(0, kind) for kind, pattern in patterns.items() if kind not in seen and pattern.search(hidden)}
    return [f"{name}, line {line}: {kind}" if line else f"{name}: {kind}" for line, kind in sorted(found)]


def _strings(text: str) -> Iterator[str]:
    """All keys and strings of a JSON text, decoded; none if it is not JSON."""
    try:
        pending: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError):
        return
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
