"""How the terminal speaks: tables and bars for people, nothing but refusals, or JSON for programs."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from keys35.errors import Keys35Error
from keys35.interrupt import INTERRUPTED, WORDS
from keys35.warned import Warned

if TYPE_CHECKING:  # a refusal within a second does not wait for what only long work needs
    from keys35.files.ledger import Workdir
    from keys35.progress import Progress, Tick

T = TypeVar("T")


class Mode(StrEnum):
    """TEXT: tables, bars, sentences. QUIET: refusals alone. JSON: a document on stdout, a line per event on stderr."""

    TEXT = "text"
    QUIET = "quiet"
    JSON = "json"


class Voice:
    """Everything a command says goes through here, so that no command knows in which mode it runs."""

    def __init__(self, console: Console, errors: Console) -> None:
        self.console, self.errors, self.mode = console, errors, Mode.TEXT
        self._refused, self._interrupted, self._speaking = False, False, threading.Lock()
        self._warned = Warned(self._warn)

    def speak(self, mode: Mode) -> None:
        """Choose the mode, before a command runs; what is logged and warned of on the way is an event of it, too."""
        self.mode, self.console.quiet = mode, mode is not Mode.TEXT
        if mode is not Mode.TEXT:
            self._warned.listen()

    def say(self, text: str, good: str = "") -> None:
        """A line for people, behind a green word if one is given; as it is and never wrapped: paths can be copied."""
        if good:
            self.console.print(f"[green]{good}[/green]", end=" ")
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def result(self, value: T, show: Callable[[Console, T], None] | None = None) -> None:
        """What a command found: shown to people, or printed whole for programs."""
        if self.mode is Mode.JSON:
            print(json.dumps(plain(value), indent=1))
        elif show:
            show(self.console, value)

    def refuse(self, error: Keys35Error | OSError | KeyboardInterrupt, code: int) -> None:
        """The one message of a refusal, on stderr; in JSON it is the last line, whatever threads still finish."""
        if self.mode is Mode.JSON:
            self.event({"error": type(error).__name__, "message": str(error), "exit_code": code}, last=True)
        else:
            self.errors.print("[bold red]keys35:[/bold red]", end=" ")
            self.errors.print(str(error), highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def progress(self, work: "Workdir | None" = None) -> "Iterator[Progress]":
        """A Progress that shows itself in this mode and keeps `work`'s heartbeat; Ctrl-C in it is a refusal too."""
        from keys35.report.live import live_progress

        try:
            with live_progress(self.console, work, {Mode.QUIET: _nothing, Mode.JSON: self._tick}.get(self.mode)) as it:
                yield it
        except KeyboardInterrupt:
            self.interrupted()
            sys.exit(INTERRUPTED)

    def interrupted(self) -> None:
        """What Ctrl-C is answered with, once."""
        if not self._interrupted:
            self._interrupted = True
            self.refuse(KeyboardInterrupt(WORDS), INTERRUPTED)

    def _warn(self, words: str) -> None:
        """Warnings are events; where nothing but refusals is to be said they are not."""
        if self.mode is Mode.JSON:
            self.event({"warning": words})

    def _tick(self, tick: "Tick") -> None:
        self.event({"progress": plain(tick)})

    def event(self, event: Mapping[str, Any], last: bool = False) -> None:
        """One line of JSON on stderr; nothing behind the `last`."""
        with self._speaking:  # a thread that was about to speak finds that all is said
            if last or not self._refused:
                self.errors.file.write(json.dumps(event) + "\n")
                self.errors.file.flush()
            self._refused |= last


def plain(value: Any) -> Any:
    """A result as JSON: dataclasses with their public properties, exact fractions and paths as text."""
    if is_dataclass(value):
        properties = [name for name in dir(type(value))
                      if name[0] != "_" and isinstance(getattr(type(value), name), property)]
        return {name: plain(getattr(value, name)) for name in [*(f.name for f in fields(value)), *properties]}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, (Fraction, Path)) else value


def _nothing(tick: "Tick") -> None:
    pass
