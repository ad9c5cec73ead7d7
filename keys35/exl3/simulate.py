"""What an encoding would be like, without the search: the error of its rounding is drawn instead of found."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..precision import whole_products
from .encode import EncodeOptions, LinearJob, Prepared, named_generator, prepared_stacks
from .hadamard import BLOCK, rotate_both
from .scale import rounding_error, tile_power


def simulate_group(
    jobs: Sequence[LinearJob], hessians: Mapping[str, Tensor], bits: float, options: EncodeOptions, seed: int
) -> dict[str, Tensor]:
    """Every job's weight (in, out), float32, with an error like that of its encoding at a width; keyed by name.

    Rotated tiles look like Gaussian noise, so the search leaves noise of a known size behind; feedback then shapes it
    as LDLQ does: rows' errors E meet (I + F)^T E = noise, with F the factor that `encode_group` rounds with. Depends on
    weight, Hessian, names, options, seed and the kind of device. Raises EncodeError as `encode_group` does.
    """
    alone = replace(options, stack_elements=1)  # nothing advances together here: one at a time takes less memory
    with torch.inference_mode(), whole_products():
        stacks = prepared_stacks(jobs, hessians, alone, seed)
        return {item.job.name: _simulated(item, bits, seed) for stack in stacks for item in stack}


def _simulated(item: Prepared, bits: float, seed: int) -> Tensor:
    split, feedback = item.split, item.factor.feedback
    generator = named_generator(seed, f"noise/{item.job.name}", split.rotated.device)
    error = torch.randn(split.rotated.shape, generator=generator, device=split.rotated.device)
    spans = split.rotated.view(-1, BLOCK, split.rotated.shape[1])
    within = None if feedback is None else feedback.view(len(spans), BLOCK, len(spans), BLOCK).diagonal(dim1=0, dim2=2)
    power = tile_power(spans, None if within is None else within.permute(2, 0, 1), bits)
    error *= (rounding_error(bits) * power).sqrt().repeat_interleave(BLOCK)[:, None]
    if feedback is not None:
        unit = feedback.T + torch.eye(len(feedback), device=feedback.device)
        error = torch.linalg.solve_triangular(unit, error, upper=True)
    weight = torch.ldexp(split.su[:, None] * rotate_both(split.rotated - error) * split.sv, split.exponent)
    rows, columns = item.job.weight.shape
    return weight[:rows, :columns].to(item.home)
