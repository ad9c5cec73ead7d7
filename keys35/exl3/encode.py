"""Encode weights to EXL3: what every other room calls.

Work is shared where it may be (a Hessian by the jobs that name it, a rotated weight by its widths) and never
leaks: the bytes of a job depend on its weight, its Hessian, the names of both, the options and the seed, not
on its company.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import EncodeError
from ..precision import short_products, whole_products
from .hadamard import BLOCK
from .hessian import HessianFactor, damped_metric, factor_hessian, usable_hessian
from .ldlq import ldlq
from .linear import EncodedLinear, decode_weight
from .refit import Target, refit
from .scale import Regularised, ScalePowers, regularise, to_half
from .sweep import sweep
from .tiles import pack, symbol_bits
from .viterbi import backend_device, get_backend, prepare

log = logging.getLogger(__name__)

LARGEST_WEIGHT = 2.0**26


@dataclass(frozen=True)
class EncodeOptions:
    """How to encode.

    backend: which tile encoder, see `viterbi.get_backend`.
    sigma_reg: damping of the Hessian, as a share of its mean diagonal.
    refit_rounds: rounds of scale refitting; a second one gains less than a thousandth.
    powers: see `scale.ScalePowers`.
    scaled_metric: put the row scales into the Hessian of the rounding, one factorisation per weight.
    sweeps: times all tiles are searched again, each given the others' errors; one takes as long as the search did.
    stack_elements: weights that advance together through LDLQ at most; bounds memory, changes no byte.
    """

    backend: str = "auto"
    sigma_reg: float = 0.025
    refit_rounds: int = 1
    powers: ScalePowers = ScalePowers()
    scaled_metric: bool = True
    sweeps: int = 0
    stack_elements: int = 3 << 27


@dataclass(frozen=True)
class LinearJob:
    """One linear layer: its name, its weight (in, out), not padded, and the key of its Hessian, if any."""

    name: str
    weight: Tensor
    hessian: str | None


@dataclass(frozen=True)
class Prepared:
    """A job with everything its widths share, on the backend's device; weight and Hessian are padded."""

    job: LinearJob
    home: torch.device
    weight: Tensor
    hessian: Tensor
    split: Regularised
    metric_scales: Tensor
    factor: HessianFactor
    sigma_reg: float

    @cached_property
    def target(self) -> Target:
        return Target.of(self.weight, self.split.exponent, self.hessian, self.sigma_reg)

    def metric(self) -> Tensor | None:
        """The matrix whose factor is `factor`, made anew: nobody holds it for a whole stack; None for a fallback."""
        return None if self.factor.fallback else damped_metric(self.hessian, self.metric_scales, self.factor.damping)


def encode_group(
    jobs: Sequence[LinearJob],
    hessians: Mapping[str, Tensor],
    widths: Sequence[float],
    options: EncodeOptions,
    seed: int,
) -> dict[tuple[str, float], EncodedLinear]:
    """Encode every job at every width; the result is keyed by (job name, width).

    A Hessian is the mean of x x^T over the inputs of the layer, (in, in), float32. The work is done on the
    backend's device, a stack at a time; results come back to where their weight was. Raises EncodeError for
    weights or widths that cannot be encoded and for a Hessian that is missing or of another size.
    """
    for bits in widths:
        symbol_bits(bits)  # refuses a width that EXL3 does not have
    prepare(options.backend, frozenset(widths))
    results = {}
    with torch.inference_mode(), whole_products():
        for prepared in prepared_stacks(jobs, hessians, options, seed):
            for bits in widths:
                results.update(_encode_stack(prepared, float(bits), options))
    return results


def prepared_stacks(
    jobs: Sequence[LinearJob], hessians: Mapping[str, Tensor], options: EncodeOptions, seed: int
) -> Iterator[list[Prepared]]:
    """Jobs of one shape, ready to be rounded, a stack at a time; raises EncodeError as `encode_group` does."""
    for job in jobs:
        _check_shapes(job, hessians)
    device = backend_device(options.backend)
    for stack in _stacks(jobs, options.stack_elements):
        homes = [job.weight.device for job in stack]
        stack = [replace(job, weight=job.weight.to(device)) for job in stack]
        padded = _padded_hessians(stack, hessians)
        yield [_prepare(*pair, padded, options, seed) for pair in zip(stack, homes, strict=True)]


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers that depend on the seed, the name and the kind of device alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


def sign_vector(seed: int, name: str, size: int, device: torch.device) -> Tensor:
    """Random signs, float32 (size,), that depend on the seed and the name alone."""
    return (torch.randint(0, 2, (size,), generator=named_generator(seed, name)) * 2.0 - 1.0).to(device)


def _check_shapes(job: LinearJob, hessians: Mapping[str, Tensor]) -> None:
    if job.weight.ndim != 2 or 0 in job.weight.shape:
        raise EncodeError(f"{job.name}: a weight must be a matrix, found shape {tuple(job.weight.shape)}")
    if job.hessian is None:
        return
    if job.hessian not in hessians:
        raise EncodeError(f"{job.name}: there is no Hessian {job.hessian!r}; or encode with hessian=None")
    shape, k = tuple(hessians[job.hessian].shape), job.weight.shape[0]
    if shape != (k, k):
        raise EncodeError(f"{job.name}: Hessian {job.hessian!r} has shape {shape}, the weight has {k} inputs")


def _check_values(job: LinearJob) -> None:
    broken = ~torch.isfinite(job.weight)
    if bool(broken.any()):
        row, column = (int(i) for i in broken.nonzero()[0])
        value = float(job.weight[row, column])
        raise EncodeError(
            f"{job.name}: {int(broken.sum())} of {job.weight.numel()} weights are not finite, the first is "
            f"{value} at input {row}, output {column}; the source checkpoint is damaged, fetch it again"
        )
    largest = float(job.weight.abs().max())
    if largest > LARGEST_WEIGHT:
        raise EncodeError(
            f"{job.name}: the largest weight is {largest:.3g}, fp16 scales hold up to {LARGEST_WEIGHT:.3g}"
        )


def _padded_shape(weight: Tensor) -> tuple[int, int]:
    k, n = (-(-size // BLOCK) * BLOCK for size in weight.shape)
    return k, n


def _pad(matrix: Tensor, shape: tuple[int, int]) -> Tensor:
    """A float32 matrix with zeros around it; the matrix itself where there is nothing to add."""
    if tuple(matrix.shape) == shape and matrix.dtype == torch.float32:
        return matrix
    padded = torch.zeros(shape, device=matrix.device)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def _stacks(jobs: Sequence[LinearJob], elements: int) -> Iterator[list[LinearJob]]:
    """Group jobs of one padded shape and device, in stacks of at most `elements` weights."""

    def key(job: LinearJob) -> tuple[int, int, str]:
        return *_padded_shape(job.weight), str(job.weight.device)

    for (k, n, _), group in itertools.groupby(sorted(jobs, key=key), key):
        alike, most = list(group), max(1, elements // (k * n))
        yield from (alike[i : i + most] for i in range(0, len(alike), most))


def _padded_hessians(jobs: Iterable[LinearJob], hessians: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    padded: dict[str, Tensor | None] = {}
    for job in jobs:
        if job.hessian is not None and job.hessian not in padded:
            usable = usable_hessian(hessians[job.hessian].to(job.weight.device))
            size = _padded_shape(job.weight)[0]
            padded[job.hessian] = None if usable is None else _pad(usable, (size, size))
    return padded


def _prepare(
    job: LinearJob,
    home: torch.device,
    hessians: Mapping[str, Tensor | None],
    options: EncodeOptions,
    seed: int,
) -> Prepared:
    _check_values(job)
    weight = _pad(job.weight, _padded_shape(job.weight))
    k, n = weight.shape
    signs_in = sign_vector(seed, f"in/{job.hessian or job.name}", k, weight.device)
    signs_out = sign_vector(seed, f"out/{job.name}", n, weight.device)
    hessian = hessians[job.hessian] if job.hessian else None
    input_power = None if hessian is None else hessian.diagonal()
    split = regularise(weight, signs_in, signs_out, input_power, options.powers)
    metric_scales = split.su if options.scaled_metric else signs_in
    factor = factor_hessian(hessian, metric_scales, options.sigma_reg)
    if factor.fallback:
        log.warning("%s: no usable Hessian, encoded for the least squared error", job.name)
        hessian = torch.eye(k, device=weight.device)
    return Prepared(job, home, weight, hessian, split, metric_scales, factor, options.sigma_reg)


def _encode_stack(
    prepared: Sequence[Prepared], bits: float, options: EncodeOptions
) -> dict[tuple[str, float], EncodedLinear]:
    weights = torch.stack([item.split.rotated for item in prepared])
    feedbacks = [item.factor.feedback for item in prepared]
    backend = get_backend(options.backend)
    states, scales = ldlq(weights, feedbacks, bits, backend)
    for _ in range(options.sweeps):
        states = sweep(weights, [item.metric() for item in prepared], states, scales, bits, backend)
    return {
        (item.job.name, bits): _finish(item, states[i], scales[i], bits, options.refit_rounds)
        for i, item in enumerate(prepared)
    }


def _finish(item: Prepared, states: Tensor, scales: Tensor, bits: float, rounds: int) -> EncodedLinear:
    split = item.split
    trellis = pack(states, bits)
    su = split.su / scales.repeat_interleave(BLOCK)
    base = decode_weight(trellis, torch.ones_like(split.su), torch.ones_like(split.sv))
    with short_products(base.device):  # fp16 scales and an error to three digits ask for no more
        suh, svh, error = refit(item.target, base, *to_half(su, split.sv, split.exponent), rounds)
    return EncodedLinear(
        trellis=trellis.to(item.home),
        suh=suh.to(item.home),
        svh=svh.to(item.home),
        bits=bits,
        proxy_error=float(error),
        fallback=item.factor.fallback,
        damping=item.factor.damping,
    )
