"""Warnings reach whoever listens, once each, and a listener that is gone stops no work."""

import logging
import warnings

from keys35.warned import Warned


def test_warnings_are_told_once() -> None:
    told: list[str] = []
    handler = Warned(told.append)
    logging.captureWarnings(False)  # a command that ran in this process before may have left it on, of other filters
    try:
        handler.listen()
        handler.listen()
        logging.getLogger("keys35.somewhere").warning("worker %s is gone", "a:1")
        logging.getLogger("keys35.somewhere").info("nothing to warn of")
        warnings.warn("divided by zero", stacklevel=1)
    finally:
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
    assert told[0] == "worker a:1 is gone" and "divided by zero" in told[1] and len(told) == 2


def test_nobody_left_to_be_told_is_no_fault() -> None:
    def gone(words: str) -> None:
        raise BrokenPipeError(words)

    Warned(gone).handle(logging.makeLogRecord({"levelno": logging.WARNING, "msg": "lost"}))
