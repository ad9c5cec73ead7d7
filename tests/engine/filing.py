"""A worker's work without a model: one file per unit, written slowly enough to be killed in the middle."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from keys35.engine.task import Task
from keys35.errors import EncodeError


def open_filing(root: str) -> Callable[[Task], None]:
    if root == "nowhere":
        raise EncodeError("nowhere is no place to work")

    def work(task: Task) -> None:
        match task.arguments.get("do"):
            case "refuse":
                raise EncodeError(f"{task.unit} cannot be encoded")
            case "fail":
                raise ZeroDivisionError("a fault")
            case "grow":
                raise MemoryError("Unable to allocate 9 TiB")
            case "warn":
                logging.getLogger("keys35.exl3").warning("%s has no usable Hessian", task.unit)
                warnings.warn("divided by zero", RuntimeWarning, stacklevel=1)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(task.arguments.get("seconds", 0))
        print("noise on stdout")
        Path(root, task.unit).write_text(f"{task.unit} {os.environ.get('SLOT')}")

    return work
