"""Weights and Hessians with GLM-5.3's shapes, drawn at random: what the encoder is measured on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..exl3.encode import LinearJob

HIDDEN, INTERMEDIATE = 6144, 2048


@dataclass(frozen=True)
class Batch:
    """Jobs that are encoded together, with their Hessians; everything on the host, as a checkpoint delivers it."""

    name: str
    jobs: Sequence[LinearJob]
    hessians: Mapping[str, Tensor]

    @property
    def weights(self) -> int:
        return sum(job.weight.numel() for job in self.jobs)

    def first(self, count: int) -> "Batch":
        """The first so many jobs."""
        jobs = self.jobs[:count]
        return Batch(self.name, jobs, {job.hessian: self.hessians[job.hessian] for job in jobs})


def _weight(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """bfloat16 (inputs, outputs): Gaussian, with rows and columns of unequal size."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weight = 0.02 * normal(inputs, outputs) * torch.exp(0.2 * normal(inputs, 1)) * torch.exp(0.2 * normal(outputs))
    return weight.bfloat16().cpu()


def _hessian(size: int, generator: torch.Generator) -> Tensor:
    """float32 (size, size): the mean of x x^T over correlated inputs of unequal power."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    inputs = normal(2 * size, size) * torch.exp(0.5 * normal(size)) + normal(2 * size, 64) @ (0.3 * normal(64, size))
    return (inputs.T @ inputs / len(inputs)).cpu()


def gate_up_batch(experts: int) -> Batch:
    """Gate and up of so many experts, which share a Hessian."""
    generator = torch.Generator("cuda").manual_seed(experts)
    names = [f"{expert}.{part}" for expert in range(experts) for part in ("gate", "up")]
    jobs = [LinearJob(name, _weight(HIDDEN, INTERMEDIATE, generator), "input") for name in names]
    return Batch(f"gate_up_{experts}", jobs, {"input": _hessian(HIDDEN, generator)})


def down_batch(experts: int) -> Batch:
    """Down of so many experts, each with its own Hessian."""
    generator = torch.Generator("cuda").manual_seed(experts + 1)
    names = [f"{expert}.down" for expert in range(experts)]
    jobs = [LinearJob(name, _weight(INTERMEDIATE, HIDDEN, generator), name) for name in names]
    return Batch(f"down_{experts}", jobs, {name: _hessian(INTERMEDIATE, generator) for name in names})
