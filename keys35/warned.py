"""What is logged or warned of on the way: a terminal's voice tells it, and a worker's driver."""

import logging
from collections.abc import Callable


class Warned(logging.Handler):
    """Gives the words of every warning to `tell`; where nobody is left to be told, that is no fault of the work."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def listen(self) -> None:
        """Hear this process's log, and its libraries' warnings, from now on; once, however often it is asked."""
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(record.getMessage())
        except OSError:
            pass
