"""Give freed memory back to the system between pieces of work, so that a long run's footprint stays its peak."""

import ctypes
import gc


def release() -> None:
    """Collect garbage and trim the C heap where the C library can (glibc); elsewhere only the former."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
