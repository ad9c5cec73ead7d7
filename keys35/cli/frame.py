"""The command line's frame: its voice, the options before a command, and what becomes of a refusal."""

import io
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from keys35 import __version__
from keys35.errors import Keys35Error, ResumeError, UsageError, out_of_memory
from keys35.interrupt import INTERRUPTED, end_imports
from keys35.report.voice import Mode, Voice

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Turn a very large mixture-of-experts checkpoint into a small EXL3 one, and prove what it lost.",
)
_watched = sys.stdout is not None and sys.stdout.isatty()  # None where a service closed it
# Tables need room: where nobody watches a terminal, they are not squeezed into 80 columns.
_console = Console(width=None if _watched or "COLUMNS" in os.environ else 140, emoji=False)
voice = Voice(_console, Console(stderr=True, emoji=False))


def _version(value: bool) -> None:
    if value:
        voice.result({"version": __version__}, lambda *_: voice.say(f"keys35 {__version__}"))
        raise typer.Exit


@app.callback()
def _options(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print refusals only")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the result as one JSON document, events as JSON lines on stderr")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="version")] = False,
) -> None:
    voice.speak(Mode.JSON if as_json else Mode.QUIET if quiet else Mode.TEXT)


def main() -> None:
    """Run the command line; a refusal is one message on stderr and its own exit code."""
    as_json = "--json" in sys.argv[1:]  # asked before anything is parsed, which is what may be refused
    if as_json:
        voice.speak(Mode.JSON)
    _say_anything()
    end_imports()
    try:
        sys.exit(app(standalone_mode=not as_json))  # typer by itself prints its refusals for people
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Ctrl-C where no progress was shown, of which typer makes a silent exit
            voice.interrupted()
        raise
    except OSError as error:
        voice.refuse(error, ResumeError.exit_code)
        sys.exit(ResumeError.exit_code)
    except Keys35Error as error:
        voice.refuse(error, error.exit_code)
        sys.exit(error.exit_code)
    except Exception as error:
        if (refusal := _usage(error) or out_of_memory(error)) is None:
            raise
        if as_json:
            voice.speak(Mode.JSON)  # behind a command the flag is what is refused, and was not taken for one before it
        voice.refuse(refusal, refusal.exit_code)
        sys.exit(refusal.exit_code)


def _say_anything() -> None:
    """A text or a path may have letters that the terminal's encoding lacks: they are spelled, as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _usage(error: Exception) -> UsageError | None:
    """What typer refuses of a command line, by its parts: releases differ in where the exceptions come from."""
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "keys35"
    if getattr(error, "option_name", "") == "--json":
        return UsageError(f"--json goes before the command: keys35 --json {command.rpartition(' ')[2]}")
    return UsageError(f"{error.format_message().rstrip('.')}. See `{command} --help`")
