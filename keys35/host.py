"""Host memory that a GPU's results end up in, and that its inputs come from."""

import torch
from torch import Tensor

WORTH_PINNING_BYTES = 1 << 20


def into_host(room: Tensor, value: Tensor) -> None:
    """Copy a tensor into host memory of its shape, of any dtype; large ones from a GPU by way of pinned memory."""
    if value.is_cuda and room.nbytes >= WORTH_PINNING_BYTES:
        staged = torch.empty(value.shape, dtype=room.dtype, pin_memory=True)
        value = staged.copy_(value)
    room.copy_(value)


def pinned(value: Tensor) -> Tensor:
    """A host tensor from which a GPU fetches at full speed; small ones as they are."""
    return value.pin_memory() if value.nbytes >= WORTH_PINNING_BYTES else value
