"""Host memory that a GPU's results end up in."""

import torch
from torch import Tensor


def into_host(room: Tensor, value: Tensor) -> None:
    """Copy a tensor into host memory of its shape, whatever its dtype; from a GPU by way of pinned memory, faster."""
    if value.is_cuda:
        staged = torch.empty(value.shape, dtype=room.dtype, pin_memory=True)
        value = staged.copy_(value)
    room.copy_(value)
