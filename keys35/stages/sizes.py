"""Bytes of every class of tensor: in the source, in the output, and on each tensor-parallel rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from keys35.glm.names import Role, Split, TensorRule
from keys35.recipe import Recipe

MARKER_BYTES = 4
SCALE_BYTES = 2  # suh and svh are fp16


@dataclass(frozen=True)
class ClassSize:
    """One row of the coverage table; bytes are tensor bytes, without safetensors headers."""

    name: str
    tensors: int
    params: int
    source_bytes: int
    output_bytes: int
    rank_bytes: int


def width_of(rule: TensorRule, recipe: Recipe) -> Fraction | None:
    """Bits per weight the recipe gives a tensor (an expert's mean), None when it is carried."""
    return {
        Role.EXPERT: recipe.experts.budget,
        Role.MTP_EXPERT: Fraction(recipe.mtp.bits),
        Role.DENSE: Fraction(recipe.dense.bits),
        Role.CARRIED: None,
    }[rule.role]


def exl3_bytes(rule: TensorRule, bits: Fraction) -> Fraction:
    """Stored bytes of one encoded linear: trellis, suh, svh and marker (format notes 1.1)."""
    k, n = rule.padded
    return k * n * bits / 8 + SCALE_BYTES * (k + n) + MARKER_BYTES


def rank_bytes(rule: TensorRule, bits: Fraction | None, nbytes: int, tp: int) -> Fraction:
    """Bytes that one of `tp` ranks reads of a tensor."""
    if bits is None:
        return Fraction(nbytes, tp if rule.split is not Split.REPLICATE else 1)
    k, n = rule.padded
    if rule.split is Split.REPLICATE:
        return exl3_bytes(rule, bits)
    cut, whole = (n, k) if rule.split is Split.OUT else (k, n)
    return k * n * bits / 8 / tp + SCALE_BYTES * (Fraction(cut, tp) + whole) + MARKER_BYTES


def class_sizes(rules: Iterable[TensorRule], recipe: Recipe, nbytes: dict[str, int], tp: int) -> list[ClassSize]:
    """The coverage table; `nbytes` gives each tensor's bytes in the source.

    Tensors of one kind are computed once and multiplied: a large model has 60,000 tensors of thirty kinds.
    """
    kinds: dict[tuple, tuple[TensorRule, int]] = {}
    for rule in rules:
        kind = (rule.role, rule.shape, rule.split, _label(rule), nbytes[rule.source])
        kinds[kind] = (rule, kinds.get(kind, (rule, 0))[1] + 1)
    rows: dict[str, list[Fraction]] = {}
    for (*_, label, size), (rule, count) in kinds.items():
        bits = width_of(rule, recipe)
        output = Fraction(size) if bits is None else exl3_bytes(rule, bits)
        amounts = (1, rule.numel, size, output, rank_bytes(rule, bits, size, tp))
        row = rows.setdefault(label, [Fraction(0)] * len(amounts))
        rows[label] = [a + count * b for a, b in zip(row, amounts, strict=True)]
    return [ClassSize(name, *(round(amount) for amount in row)) for name, row in rows.items()]


def _label(rule: TensorRule) -> str:
    if rule.role is Role.CARRIED and rule.projection:
        return "dense BF16 linears"
    return {
        Role.EXPERT: "routed experts",
        Role.MTP_EXPERT: "MTP experts",
        Role.DENSE: "dense EXL3 linears",
        Role.CARRIED: "carried",
    }[rule.role]
