"""The panel: the token windows on which a checkpoint is compared with its reference."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keys35.errors import RankError, RecipeError
from keys35.files.atomic import write_json
from keys35.files.forms import read_formed

SHORTEST = 3  # an MTP draft needs a token two positions on
_WINDOW = {"type": "object", "required": ["domain", "tokens"], "properties": {
    "domain": {"type": "string"}, "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}}
_FORM = {"type": "object", "required": ["name", "windows"], "properties": {
    "name": {"type": "string"}, "windows": {"type": "array", "items": _WINDOW}}}


@dataclass(frozen=True)
class Panel:
    """Windows of token ids (S,), lengths may differ, each with the name of its domain."""

    name: str
    tokens: tuple[Tensor, ...]
    domains: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.domains):
            raise RecipeError(
                f"panel '{self.name}' has {len(self.tokens)} windows and {len(self.domains)} domain names; "
                "give at least one window, and a domain for each"
            )
        if min(len(window) for window in self.tokens) < SHORTEST:
            raise RecipeError(f"panel '{self.name}' has a window of fewer than {SHORTEST} tokens; drop it")

    @property
    def token_count(self) -> int:
        return sum(len(window) for window in self.tokens)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the windows and their domains: two panels compare only if these are equal."""
        return hashlib.sha256(json.dumps(self._windows()).encode()).hexdigest()

    def check_vocabulary(self, size: int) -> None:
        """Refuse (RecipeError) token ids that the model does not have."""
        worst = max(int(window.max()) for window in self.tokens)
        if worst >= size:
            raise RecipeError(
                f"panel '{self.name}' has token {worst}, the model's vocabulary ends at {size - 1}; "
                "make the panel with this checkpoint's tokenizer"
            )

    def save(self, path: Path) -> None:
        write_json(path, {"name": self.name, "windows": self._windows()})

    @classmethod
    def load(cls, path: Path) -> "Panel":
        stored = read_formed(path, _FORM, RankError, "make the panel again")
        windows = stored["windows"]
        tokens = tuple(torch.tensor(window["tokens"]) for window in windows)
        return cls(stored["name"], tokens, tuple(window["domain"] for window in windows))

    @classmethod
    def of(cls, name: str, tokens: Sequence[Tensor], domains: Sequence[str]) -> "Panel":
        """A panel of windows (a tensor (N, W) works too)."""
        return cls(name, tuple(window.long() for window in tokens), tuple(domains))

    def _windows(self) -> list[dict[str, object]]:
        return [
            {"domain": domain, "tokens": window.tolist()}
            for window, domain in zip(self.tokens, self.domains, strict=True)
        ]
