"""Ctrl-C while modules are imported: answered here with the standard library alone, before anything else can."""

import json
import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 130  # what shells say of a command that Ctrl-C ended
WORDS = "interrupted; what is finished is kept, the same command goes on from there"


def say() -> None:
    """The one message on stderr, as JSON where a program asked for it."""
    event = {"error": KeyboardInterrupt.__name__, "message": WORDS, "exit_code": INTERRUPTED}
    print(json.dumps(event) if "--json" in sys.argv[1:] else f"keys35: {WORDS}", file=sys.stderr, flush=True)


def end_imports() -> None:
    """From now on Ctrl-C in the middle of an import ends the process, and raises KeyboardInterrupt elsewhere.

    An import cannot be left in the middle: torch takes one that was for a numpy that is not there, and goes on. What is
    already answered otherwise stays so, as in a shell's background job, which ignores it.
    """
    mine = threading.current_thread() is threading.main_thread()
    if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            say()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
