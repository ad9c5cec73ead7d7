"""How ranks talk: sums and gathers whose results are the same on every run."""

import datetime

import torch
import torch.distributed as dist
from torch import Tensor

from keys35.glm.block import wide

REDUCE_VALUES = 1 << 20


class Ranks:
    """A single rank, which has nobody to talk to."""

    rank, world = 0, 1

    def all(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order."""
        return [x]

    def first(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's x on rank 0, None elsewhere."""
        return [x]

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, float32 or better. Added in rank order, so that it repeats to the last bit."""
        total = wide(x).contiguous().clone()
        for piece in total.view(-1).split(REDUCE_VALUES):  # bounds the copies of the other ranks' parts
            parts = self.all(piece)
            piece.copy_(parts[0])
            for part in parts[1:]:
                piece += part
        return total

    def logits(self, share: Tensor) -> Tensor | None:
        """Logits (rows, vocabulary) on rank 0 from every rank's columns; None elsewhere."""
        parts = self.first(share.contiguous())
        return None if parts is None else torch.cat(parts, -1)

    def greedy(self, share: Tensor) -> Tensor:
        """The best token (rows,) over all ranks' columns of the logits, known to every rank."""
        value, index = share.max(-1)
        values = torch.stack(self.all(value.contiguous()))
        indices = torch.stack(self.all((index + self.rank * share.shape[-1]).contiguous()))
        return indices.gather(0, values.argmax(0, keepdim=True))[0]


class GroupRanks(Ranks):
    """Ranks of a torch.distributed job started by torchrun: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def all(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x)
        return parts

    def first(self, x: Tensor) -> list[Tensor] | None:
        parts = [torch.empty_like(x) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(x, parts)
        return parts

    def close(self) -> None:
        dist.destroy_process_group()
