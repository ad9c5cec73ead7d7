"""Rules about values that must be decoded: all of them with `deep`, a sample of them against the source."""

import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from keys35.exl3.linear import decode_weight
from keys35.glm.names import TensorRule, exl3_parts
from keys35.stages.check_tensors import row_pieces
from keys35.stages.contract import Checkpoint, Finding, broken

SLAB = 2048  # output features decoded at a time: whole blocks of 128, so that large linears fit anywhere
RMS_RANGE = (1e-5, 10.0)
WORST_ERROR = 8.0  # times 4^-bits; the bundled model's linears have 1.2 to 2.6, noise has 2 x 4^bits


def check_decoded(point: Checkpoint) -> Iterator[Finding]:
    """With `deep`: every stored value finite, every decoded linear of a sane size."""
    if not point.deep:
        return
    infinite: list[tuple[str, str]] = []
    odd: list[tuple[str, str]] = []
    for step in point.progress.walk("check", _by_layer(point), lambda rules: rules[0].name):
        for rule in step.unit:
            count, rms = _decoded(point, rule) if rule.name in point.widths else (_carried(point, rule), None)
            if count:
                infinite.append((rule.name, f"has {count} that are not"))
            elif rms is not None and not RMS_RANGE[0] <= rms <= RMS_RANGE[1]:
                odd.append((rule.name, f"has {rms:.3g}"))
    yield from broken("value-finite", infinite)
    yield from broken("value-scale", odd)


def _by_layer(point: Checkpoint) -> list[list[TensorRule]]:
    """Rules in order, a layer or a tensor outside of layers at a time."""
    return [list(rules) for _, rules in groupby(point.rules.values(), lambda rule: (rule.layer, rule.expert is None))]


def _decoded(point: Checkpoint, rule: TensorRule) -> tuple[int, float | None]:
    """Values that are not finite, and the root mean square; None if the linear is zero or cannot be decoded."""
    infinite, squares = 0, 0.0
    for _, slab in _slabs(point, rule):
        infinite += int((~torch.isfinite(slab)).sum())
        squares += float(slab.double().square().sum())
    return infinite, math.sqrt(squares / rule.numel) or None


def _carried(point: Checkpoint, rule: TensorRule) -> int:
    """Values that are not finite; none of another dtype, which has a finding of its own and may be unreadable."""
    tensor = point.stored.tensors.get(rule.name)
    if rule.quantized or tensor is None or tensor.entry.dtype not in rule.dtypes:
        return 0
    pieces = (point.stored.read_slice(rule.name, 0, *piece) for piece in row_pieces(tensor.entry))
    return sum(int((~torch.isfinite(piece)).sum()) for piece in pieces)


def check_sample(point: Checkpoint) -> Iterator[Finding]:
    """`sample` linears against the reference, spread evenly over widths and names: relative squared error.

    The bound is 8 x 4^-bits, three times what the encoder's worst linear on the bundled model has; a linear that
    was swapped, transposed or decoded with another codebook misses it by far.
    """
    if point.reference is None or not point.sample:
        return
    names = sorted((name for name in point.widths if point.rules[name].source in point.reference.tensors),
                   key=lambda name: (point.widths[name], name))
    count = min(point.sample, len(names))
    picked = [point.rules[names[index * len(names) // count]] for index in range(count)]
    errors = {rule.name: (_relative_error(point, rule), worst_error(point.widths[rule.name])) for rule in picked}
    yield from broken("value-source", (
        (name, f"differs by {error:.3g} of its square, {bound:.3g} is allowed at {point.widths[name]} bits")
        for name, (error, bound) in errors.items() if not error <= bound))


def worst_error(bits: int) -> float:
    """The largest |W - W_decoded|^2 / |W|^2 that a width may have."""
    return min(0.9, WORST_ERROR / 4**bits)


def _relative_error(point: Checkpoint, rule: TensorRule) -> float:
    missed = total = 0.0
    for rows, slab in _slabs(point, rule):
        exact = point.reference.read_slice(rule.source, 0, rows.start, rows.stop).to(slab)
        missed += float((slab - exact).double().square().sum())
        total += float(exact.double().square().sum())
    return missed / total if total else missed


def _slabs(point: Checkpoint, rule: TensorRule) -> Iterator[tuple[range, Tensor]]:
    """A decoded linear (out, in) without padding, some output features at a time; nothing if parts are malformed."""
    names = exl3_parts(rule.module)
    parts = [names[part] for part in ("trellis", "suh", "svh")]
    k, n = rule.padded
    wanted = [("I16", (k // 16, n // 16, 16 * point.widths[rule.name])), ("F16", (k,)), ("F16", (n,))]
    entries = [point.stored.tensors[name].entry for name in parts if name in point.stored.tensors]
    if [(entry.dtype, entry.shape) for entry in entries] != wanted:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trellis, suh, svh = (point.stored.read(name).to(device) for name in parts)
    for first in range(0, rule.out_features, SLAB):
        last = min(first + SLAB, n)
        weight = decode_weight(trellis[:, first // 16 : last // 16].contiguous(), suh, svh[first:last])
        real = range(first, min(last, rule.out_features))
        yield real, weight[: rule.in_features, : len(real)].T
