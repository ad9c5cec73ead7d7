"""Files of a unit that are written while the next one is worked on."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keys35.stages.job import Job
from keys35.stages.spans import Spans


def saving(job: Job, unit: str, event: str, finish: Callable[[], None]) -> Callable[[], None]:
    """Begin to write a unit's files and declare it done; what is returned waits for that, and raises what it does.

    event: what the log calls it, with the seconds that it was waited for and, as `took`, all that it took.
    """
    def timed() -> float:
        begun = time.perf_counter()
        finish()
        return time.perf_counter() - begun

    pool = ThreadPoolExecutor(1, "saving")
    finishing = pool.submit(timed)

    def conclude() -> None:
        waited = Spans(job.device)
        with waited("writing"):
            took = finishing.result()
        pool.shutdown()
        job.work.log(event, unit=unit, seconds=waited.facts(), took=round(took, 3))

    return conclude
