"""Documents -> tokens -> windows, split by document so that no text serves two purposes."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from keys35.calibration.chat import ChatTemplate
from keys35.calibration.text import Chat, Document, Domain, TextSet, TokenIds, documents, key_of
from keys35.errors import PlanError, ResumeError, SourceError
from keys35.files.atomic import load_tensors, save_tensors, write_json
from keys35.files.forms import read_formed

SELECTION_SHARE = 4  # one document in four is held out for selection
_SEALED = {"type": "object", "required": ["tokenizer_sha256", "domains"], "properties": {
    "tokenizer_sha256": {"type": "string"}, "domains": {"type": "array", "items": {"type": "string"}}}}


@dataclass(frozen=True)
class Windows:
    """Token windows without padding. tokens (N, W) int64; domain (N,) index into `domains`."""

    tokens: torch.Tensor
    domain: torch.Tensor
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def head(self, count: int) -> "Windows":
        """About `count` windows, the same number from each domain's start."""
        share = max(1, count // len(self.domains))
        rows = [torch.nonzero(self.domain == d).flatten()[:share] for d in range(len(self.domains))]
        keep = torch.cat(rows)
        return Windows(self.tokens[keep], self.domain[keep], self.domains)

    def only(self, rows: Sequence[int]) -> "Windows":
        """The windows of these numbers."""
        return Windows(self.tokens[list(rows)], self.domain[list(rows)], self.domains)

    def halves(self) -> torch.Tensor:
        """For each window 0 or 1: the first or the second half of its domain's windows."""
        half = torch.zeros_like(self.domain)
        for number in range(len(self.domains)):
            rows = torch.nonzero(self.domain == number).flatten()
            half[rows[len(rows) // 2 :]] = 1
        return half


class WindowMaker:
    """Cuts a text set into windows with the checkpoint's own tokenizer."""

    def __init__(self, tokenizer_file: Path, end_of_document: int, window: int, seed: int):
        if not tokenizer_file.is_file():
            raise SourceError(f"{tokenizer_file} is missing: calibration needs the checkpoint's tokenizer.json")
        self.tokenizer_sha256 = hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
        self._tokenizer = read_tokenizer(tokenizer_file)
        self._root, self._template = tokenizer_file.parent, None
        self._end = end_of_document
        self._window = window
        self._seed = seed
        marks = [self._tokenizer.token_to_id(mark) for mark in ("[gMASK]", "<sop>")]
        self._prefix = [] if None in marks else marks  # GLM's document start; other tokenizers have none

    def make(self, text: TextSet, counts: Sequence[int], split: str | None) -> Windows:
        """`counts[d]` windows of domain d from the documents of `split` ("fit", "selection", None: all).

        Raises PlanError when a domain has too little text.
        """
        tokens, domain = [], []
        for index, (item, count) in enumerate(zip(text.domains, counts, strict=True)):
            rows = self._domain_windows(item, count, split)
            tokens.append(rows)
            domain += [index] * count
        names = tuple(d.name for d in text.domains)
        return Windows(torch.from_numpy(np.concatenate(tokens)), torch.tensor(domain), names)

    def _domain_windows(self, domain: Domain, count: int, split: str | None) -> np.ndarray:
        stream, sides = array("q"), _Sides()
        for document in documents(domain):
            if split is None or sides.of(key_of(document)) == split:
                ids = self._ids(document)
                start = [] if ids[: len(self._prefix)] == self._prefix else self._prefix  # a template may begin with it
                stream.extend([*start, *ids, self._end])
        available = len(stream) // self._window
        if available < count:
            purpose = f"{split} windows" if split else "panel windows"
            raise PlanError(
                f"domain '{domain.name}' has text for {available} {purpose} of {self._window} tokens, "
                f"{count} asked: add text to the set, or lower the recipe's number or length of windows"
            )
        rows = np.array(stream, dtype=np.int64)[: available * self._window].reshape(available, self._window)
        order = np.random.default_rng([self._seed, len(domain.name)]).permutation(available)[:count]
        return rows[np.sort(order)]

    @cached_property
    def _largest_id(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1)

    def _ids(self, document: Document) -> list[int]:
        """A document's tokens, one at a time: an encoding keeps offsets and words, some hundred bytes per token."""
        if isinstance(document, TokenIds):
            if document.tokenizer_sha256 != self.tokenizer_sha256:
                raise PlanError(
                    f"{document.file} holds token ids of another tokenizer ({document.tokenizer_sha256[:12]}..., the "
                    f"checkpoint has {self.tokenizer_sha256[:12]}...): make it with the checkpoint's tokenizer.json, "
                    "or give the text itself"
                )
            if document.ids and max(document.ids) > self._largest_id:
                raise PlanError(f"{document.file} holds token {max(document.ids)}, the tokenizer's last is "
                                f"{self._largest_id}: make it again, or give the text itself")
            return list(document.ids)
        if isinstance(document, Chat):
            self._template = self._template or ChatTemplate(self._root)
            document = self._template.render(document.messages)
        return self._tokenizer.encode(document, add_special_tokens=False).ids


def read_tokenizer(path: Path) -> Tokenizer:
    """A checkpoint's tokenizer, which neither cuts nor pads; raises SourceError when it is missing or damaged."""
    if not path.is_file():
        raise SourceError(f"{path} is missing; give the folder of a checkpoint that has its tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())  # the library opens no path that is not UTF-8
    except Exception as error:  # the library raises bare Exceptions
        raise SourceError(f"{path} cannot be read as a tokenizer ({error}); copy the source's") from None
    # A file that was saved after training or serving may carry a length: documents would lose their ends silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def shares(text: TextSet, total: int) -> list[int]:
    """`total` windows divided by the domains' shares, at least one each, largest remainders first."""
    weights = np.array([d.share for d in text.domains])
    ideal = weights / weights.sum() * total
    counts = np.maximum(1, np.floor(ideal)).astype(int)
    for index in np.argsort(-(ideal - np.floor(ideal)), kind="stable"):
        if counts.sum() < total:
            counts[index] += 1
    return counts.tolist()


def save_windows(path: Path, windows: Windows, tokenizer_sha256: str) -> list[Path]:
    """Seal windows on disk with the tokenizer's hash and every row's first tokens; returns the files."""
    tensors = {"tokens": windows.tokens.to(torch.int32), "domain": windows.domain.to(torch.int32)}
    save_tensors(path.with_suffix(".safetensors"), tensors, None)
    facts = {
        "domains": list(windows.domains),
        "tokenizer_sha256": tokenizer_sha256,
        "first_tokens": windows.tokens[:, :8].tolist(),
    }
    write_json(path.with_suffix(".json"), facts)
    return [path.with_suffix(".safetensors"), path.with_suffix(".json")]


def load_windows(path: Path, tokenizer_sha256: str, expect_sha256: str | None = None) -> Windows:
    """Read sealed windows back; raises ResumeError if another tokenizer made them, or the file was changed."""
    facts = read_formed(path.with_suffix(".json"), _SEALED)
    if facts["tokenizer_sha256"] != tokenizer_sha256:
        raise ResumeError(
            f"{path}: these token ids were made by another tokenizer "
            f"({facts['tokenizer_sha256'][:12]}..., the checkpoint has {tokenizer_sha256[:12]}...). "
            "Use a new work directory."
        )
    tensors = load_tensors(path.with_suffix(".safetensors"), expect_sha256)
    return Windows(tensors["tokens"].long(), tensors["domain"].long(), tuple(facts["domains"]))


class _Sides:
    """The side of the split that each document of a domain falls on, asked in the domain's order."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def of(self, document: str) -> str:
        """The same document always falls on the same side, whatever else is in the set.

        A copy with other space around it, which has another hash, falls where the first one did.
        """
        return self._known.setdefault(hashlib.sha256(document.strip().encode()).digest(), _side(document))


def _side(document: str) -> str:
    digest = hashlib.sha256(document.encode()).digest()
    return "selection" if digest[0] % SELECTION_SHARE == 0 else "fit"
