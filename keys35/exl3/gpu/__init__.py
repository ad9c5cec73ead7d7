"""Our own CUDA sources, compiled on first use; importing this package needs neither a GPU nor a compiler."""

from functools import lru_cache


@lru_cache
def usable(device: int) -> bool:
    """Whether our kernels run on a torch CUDA device: new enough, and something here can compile for it."""
    from ...errors import EncodeError
    from .compile import compiler
    from .launch import Limits

    try:
        return bool(Limits.of(device) and compiler())
    except EncodeError:
        return False
