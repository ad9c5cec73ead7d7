"""Between a GPU and the host's memory, where what it computes is kept: large pieces by way of pinned memory."""

import torch
from torch import Tensor

WORTH_PINNING_BYTES = 1 << 20
PIECE_BYTES = 1 << 26


def fill(room: Tensor, value: Tensor) -> None:
    """Copy a tensor into room of its shape, of any dtype, on the host or on the same GPU."""
    if value.is_cuda and not room.is_cuda:
        value = value.to(room.dtype)  # there: a copy to the host that converts does so on the host, far slower
        if room.nbytes >= WORTH_PINNING_BYTES:
            value = torch.empty(value.shape, dtype=room.dtype, pin_memory=True).copy_(value)
    room.copy_(value)


def on_host(value: Tensor) -> Tensor:
    """A tensor (n, ..) on the host; from a GPU beside whatever that is given to do from now on."""
    if not value.is_cuda:
        return value
    room = torch.empty(value.shape, dtype=value.dtype)
    rows = max(1, PIECE_BYTES * len(value) // max(1, value.nbytes))
    aside = torch.cuda.Stream(value.device)
    aside.wait_stream(torch.cuda.current_stream(value.device))
    with torch.cuda.stream(aside):
        for into, piece in zip(room.split(rows), value.split(rows), strict=True):
            fill(into, piece)
    return room
