"""How ranks talk: sums and gathers whose results are the same on every run."""

import contextlib
import datetime
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from keys35.errors import RankError
from keys35.glm.block import sum_shares

REDUCE_VALUES = 1 << 20


class Ranks:
    """A single rank, which has nobody to talk to."""

    rank, world = 0, 1
    backend, communication_s = "none", 0.0

    def all(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order."""
        return [x]

    def first(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's x on rank 0, None elsewhere."""
        return [x]

    def reduce(self, shares: Tensor) -> Tensor:
        """The sum of every rank's shares (shares, ...), float32 or better, in the one order of `sum_shares`."""
        total = sum_shares(shares).contiguous()
        if self.world == 1:
            return total
        for piece in total.view(-1).split(REDUCE_VALUES):  # bounds the copies of the other ranks' parts
            piece.copy_(sum_shares(torch.stack(self.all(piece))))
        return total

    def meet(self, device: torch.device) -> None:
        """Wait until every rank is here."""
        self.all(torch.zeros(1, device=device))[-1].item()

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


class LostRankError(RankError):
    """Another rank went away: that one, not this, has the cause."""


class GroupRanks(Ranks):
    """Ranks of a torch.distributed job started by torchrun: NCCL with a GPU each, else gloo through the host."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        self.backend = backend
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._seconds, self._marks = 0.0, []

    @property
    def communication_s(self) -> float:
        """Seconds spent in exchanges so far, waiting for slower ranks included."""
        if self._marks:
            self._marks[-1][1].synchronize()
        return self._seconds + sum(begin.elapsed_time(end) for begin, end in self._marks) / 1e3

    def all(self, x: Tensor) -> list[Tensor]:
        with self._clock(x):
            sent = self._outward(x)
            parts = [torch.empty_like(sent) for _ in range(self.world)]
            dist.all_gather(parts, sent)
            return [part.to(x.device) for part in parts]

    def first(self, x: Tensor) -> list[Tensor] | None:
        with self._clock(x):
            sent = self._outward(x)
            parts = [torch.empty_like(sent) for _ in range(self.world)] if self.rank == 0 else None
            dist.gather(sent, parts)
            return None if parts is None else [part.to(x.device) for part in parts]

    def _outward(self, x: Tensor) -> Tensor:
        return x.cpu() if self.backend == "gloo" else x

    @contextlib.contextmanager
    def _clock(self, x: Tensor) -> Iterator[None]:
        """Time an exchange: by events on a GPU, whose work runs behind the program's back."""
        if self.backend == "nccl":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._marks.append((begin, end))
            return
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            text = f"rank {self.rank} lost another rank in an exchange ({error}); see that one's message"
            raise LostRankError(text) from error
        self._seconds += time.perf_counter() - started

    def close(self) -> None:
        dist.destroy_process_group()
