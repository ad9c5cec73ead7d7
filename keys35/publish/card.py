"""Links of a model card, resolved against the files that will lie beside it."""

import posixpath
import re
from collections.abc import Collection, Iterator
from urllib.parse import unquote, urlsplit

LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'(][^)]*)?\s*\)|(?:href|src)\s*=\s*[\"']([^\"']+)[\"']")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)", re.MULTILINE)
CODE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
HUBS = {"huggingface.co", "hf.co", "www.huggingface.co"}
VIEWS = {"blob", "resolve", "raw", "tree"}


def broken_links(card: str, repo: str, names: Collection[str]) -> list[str]:
    """Links of the card that lead to no file of the repository, each with the reason.

    A relative link must name a published file or folder; so must a hub link into `repo`; a hub link into
    another repository must not name a file that only this one has (a card copied from a sibling).
    """
    folders = {"."} | {posixpath.dirname(name) or "." for name in names}
    return [f"README.md: link {target!r} {reason}" for target in dict.fromkeys(_targets(card))
            if (reason := _broken(target, repo, names, folders))]


def _targets(card: str) -> Iterator[str]:
    prose = CODE.sub("", card)
    for match in LINK.finditer(prose):
        yield match[1] or match[2]
    for match in REFERENCE.finditer(prose):
        yield match[1]


def _broken(target: str, repo: str, names: Collection[str], folders: set[str]) -> str:
    try:
        parts = urlsplit(target)
    except ValueError:  # a host in brackets that is no IPv6 address, as in https://[your-host]/
        return "is no address"
    if not parts.scheme and not parts.netloc:
        return _missing(unquote(parts.path), names, folders) if parts.path else ""
    if parts.hostname not in HUBS:
        return "" if parts.scheme in ("http", "https", "mailto") else "is neither a web address nor a file"
    path = unquote(parts.path).strip("/").split("/")
    if len(path) < 5 or path[2] not in VIEWS:
        return ""
    owner, file = "/".join(path[:2]), "/".join(path[4:])
    if owner == repo:
        return _missing(file, names, folders)
    ours = file in names and (file.startswith("KEYS35_") or file.endswith(".safetensors"))
    return f"leads into {owner}, this is {repo}" if ours else ""


def _missing(file: str, names: Collection[str], folders: set[str]) -> str:
    plain = posixpath.normpath(file)
    return "" if plain in names or plain in folders else "names no file of the checkpoint"
