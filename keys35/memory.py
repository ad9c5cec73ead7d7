"""Give freed memory back to the system between pieces of work, so that a long run's footprint stays its peak."""

import ctypes
import gc
from functools import lru_cache


def release() -> None:
    """Collect garbage and trim the C heap where the C library can (glibc); elsewhere only the former."""
    _freeze()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _freeze() -> None:
    """Leave what is alive at the first call, mostly modules, out of every later search: a tenth of a second each."""
    gc.collect()
    gc.freeze()
