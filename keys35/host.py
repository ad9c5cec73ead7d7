"""Host memory that a GPU's results end up in."""

import torch
from torch import Tensor

WORTH_PINNING_BYTES = 1 << 20


def into_host(room: Tensor, value: Tensor) -> None:
    """Copy a tensor into host memory of its shape, of any dtype; large ones from a GPU by way of pinned memory."""
    if value.is_cuda:
        value = value.to(room.dtype)  # there: a copy to the host that converts does so on the host, far slower
        if room.nbytes >= WORTH_PINNING_BYTES:
            value = torch.empty(value.shape, dtype=room.dtype, pin_memory=True).copy_(value)
    room.copy_(value)
