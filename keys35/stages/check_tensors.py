"""Rules about tensors: names, dtypes, shapes and widths from headers, small values, carried bytes."""

import re
from collections.abc import Iterator

import torch

from keys35.allocation import plain_width
from keys35.exl3.codebook import MARKERS
from keys35.files.headers import TensorEntry
from keys35.files.source import ShardedSource
from keys35.glm.names import Role, TensorRule, exl3_parts, split_axis
from keys35.recipe import EXPERT_WIDTHS, PLAIN_BITS
from keys35.stages.contract import Checkpoint, Finding, broken, is_off_cut
from keys35.stages.zero_columns import lost_columns, zero_columns

PIECE_BYTES = 64 << 20
FORBIDDEN = re.compile(
    r"shared_head\.head|layers\.\d+\.embed_tokens|\.rank\d+\.|\.(su|sv|scale|weight_scale|weight_scale_inv)$"
)


def check_names(point: Checkpoint) -> Iterator[Finding]:
    """Every stored name against the table of names, in both directions."""
    stored = point.stored.tensors.keys()
    encoded = {rule.module for rule in point.rules.values() if rule.quantized}
    carried = {rule.module for rule in point.rules.values() if not rule.quantized}
    wanted = {part for module in encoded for part in exl3_parts(module).values()}
    wanted |= {rule.name for rule in point.rules.values() if not rule.quantized}
    bad: dict[str, list[tuple[str, str]]] = {}
    for name in stored - wanted:
        module, _, part = name.rpartition(".")
        if part in ("mcg", "mul1") and module in encoded:
            bad.setdefault("codebook", []).append((name, "is a second marker"))
        elif FORBIDDEN.search(name) or (part in ("bias", "weight") and module in encoded):
            bad.setdefault("name-forbidden", []).append((name, "is stored"))
        elif part in exl3_parts("") and module in carried:
            bad.setdefault("carried-encoded", []).append((name, "is stored"))
        else:
            bad.setdefault("name-unknown", []).append((name, "has none"))
    for rule, cases in bad.items():
        yield from broken(rule, sorted(cases))
    yield from broken("name-missing", ((name, "is not") for name in sorted(wanted - stored)))


def check_headers(point: Checkpoint) -> Iterator[Finding]:
    """Dtypes and shapes of everything that is stored and expected; fills in the checkpoint's widths."""
    cases: dict[str, list[tuple[str, str]]] = {}
    for rule in point.rules.values():
        found = _encoded_faults(point, rule) if rule.quantized else _carried_faults(point, rule)
        for broken_rule, name, what in found:
            cases.setdefault(broken_rule, []).append((name, what))
    for broken_rule, faults in cases.items():
        yield from broken(broken_rule, faults)


def _encoded_faults(point: Checkpoint, rule: TensorRule) -> Iterator[tuple[str, str, str]]:
    parts = {part: point.stored.tensors[name].entry
             for part, name in exl3_parts(rule.module).items() if name in point.stored.tensors}
    if "trellis" in parts:
        yield from _trellis_faults(point, rule, parts["trellis"])
    for part, length in zip(("suh", "svh"), rule.padded, strict=True):
        if part in parts and parts[part].dtype != "F16":
            yield "scale-dtype", parts[part].name, f"is {parts[part].dtype}"
        if part in parts and parts[part].shape != (length,):
            yield "scale-length", parts[part].name, f"is {list(parts[part].shape)}, not {[length]}"
    marker = parts.get("mul1")
    if marker and (marker.dtype, marker.shape) != ("I32", ()):
        yield "marker-form", marker.name, f"is {marker.dtype} {list(marker.shape)}"


def _trellis_faults(
    point: Checkpoint, rule: TensorRule, entry: TensorEntry
) -> Iterator[tuple[str, str, str]]:
    k, n = rule.padded
    if entry.dtype != "I16":
        yield "trellis-dtype", entry.name, f"is {entry.dtype}"
    if len(entry.shape) != 3 or entry.shape[:2] != (k // 16, n // 16):
        yield "trellis-shape", entry.name, f"is {list(entry.shape)}, not {[k // 16, n // 16]} and 16 K"
        return
    bits = entry.shape[2] / 16
    if bits not in EXPERT_WIDTHS:
        yield "width-legal", entry.name, f"has {bits:g}"
    else:
        point.widths[rule.name] = plain_width(bits)
    axis = split_axis(rule, "trellis")
    if axis is not None and is_off_cut(rule, entry.shape[axis] * 16):
        yield "tp-cut", entry.name, f"has {entry.shape[axis] * 16} features on the cut axis"


def _carried_faults(point: Checkpoint, rule: TensorRule) -> Iterator[tuple[str, str, str]]:
    if rule.name not in point.stored.tensors:
        return
    entry = point.stored.tensors[rule.name].entry
    legal = rule.dtypes
    if point.reference is not None and rule.source in point.reference.tensors:
        legal = (point.reference.tensors[rule.source].entry.dtype,)
    if entry.dtype not in legal:
        yield "carried-dtype", rule.name, f"is {entry.dtype}, not {' or '.join(legal)}"
    if entry.shape != rule.shape:
        yield "carried-shape", rule.name, f"is {list(entry.shape)}, not {list(rule.shape)}"
        return
    axis = split_axis(rule)
    if axis is not None and is_off_cut(rule, entry.shape[axis]):
        yield "tp-cut", rule.name, f"has {entry.shape[axis]} {'rows' if axis == 0 else 'columns'}"


def check_widths(point: Checkpoint) -> Iterator[Finding]:
    """One width per expert, and the declared widths for the rest."""
    experts: dict[tuple[int | None, int | None], dict[str, int]] = {}
    for name, bits in point.widths.items():
        rule = point.rules[name]
        if rule.expert is not None:
            experts.setdefault((rule.layer, rule.expert), {})[rule.module] = bits
    mixed = [(next(iter(by)).rpartition(".")[0], f"has {sorted(by.values())}")
             for by in experts.values() if len(set(by.values())) > 1]
    yield from broken("expert-width", mixed)
    kinds = {Role.MTP_EXPERT: ("mtp-width", "mtp_bits"), Role.DENSE: ("dense-width", "dense_bits")}
    for role, (broken_rule, key) in kinds.items():
        declared = point.quantization.get(key)
        odd = [name for name, bits in point.widths.items()
               if point.rules[name].role is role and bits != declared]
        cases = [(name, f"has {point.widths[name]}, declared is {declared!r}") for name in odd]
        if role is Role.DENSE and point.profile == "bf16-rest" and declared != PLAIN_BITS:
            cases.append((key, f"is {declared!r}, not {PLAIN_BITS}: these linears stay BF16"))
        yield from broken(broken_rule, cases)


def check_values(point: Checkpoint) -> Iterator[Finding]:
    """Markers and scales, which must be read; wrong shapes and dtypes have rules of their own."""
    cases: dict[str, list[tuple[str, str]]] = {}
    for rule in point.rules.values():
        if rule.quantized:
            for broken_rule, name, what in _value_faults(point, rule):
                cases.setdefault(broken_rule, []).append((name, what))
    for broken_rule, found in cases.items():
        yield from broken(broken_rule, found)


def _value_faults(point: Checkpoint, rule: TensorRule) -> Iterator[tuple[str, str, str]]:
    names = exl3_parts(rule.module)
    marker = _stored(point.stored, names["mul1"], "I32", ())
    if marker is not None and int(marker) & 0xFFFFFFFF != MARKERS["mul1"]:
        yield "marker-value", names["mul1"], f"is {int(marker) & 0xFFFFFFFF:#010x}"
    suh = _stored(point.stored, names["suh"], "F16", rule.padded[:1])
    svh = _stored(point.stored, names["svh"], "F16", rule.padded[1:])
    for name, scale in ((names["suh"], suh), (names["svh"], svh)):
        if scale is not None and not torch.isfinite(scale).all():
            yield "scale-finite", name, f"has {int((~torch.isfinite(scale)).sum())} that are not"
    if svh is None:
        return
    padding = svh[rule.out_features :]
    if padding.count_nonzero():
        yield "svh-padding", names["svh"], f"has {int(padding.count_nonzero())} that are not"
    if wrong := _wrong_zeros(point, rule, names["svh"], svh):
        yield "svh-zero", names["svh"], f"is zero in {wrong}"


def _wrong_zeros(point: Checkpoint, rule: TensorRule, name: str, svh: torch.Tensor) -> str:
    """Real columns of an svh that are zero and should not be, in words; "" if there are none.

    Without a reference the assembly report tells how many the source has: a dead row is no fault of the checkpoint.
    """
    zeros = zero_columns(rule, svh)
    if point.reference is not None and rule.source in point.reference.tensors:
        lost = lost_columns(rule, zeros, point.reference)
        return f"column {lost[0]}" if lost else ""
    listed = point.report.get("zero_columns")
    known = listed.get(name, 0) if isinstance(listed, dict) else 0
    return "" if len(zeros) == known else f"{len(zeros)} columns, the report says {known}"


def _stored(source: ShardedSource, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    tensor = source.tensors.get(name)
    good = tensor is not None and (tensor.entry.dtype, tensor.entry.shape) == (dtype, shape)
    return source.read(name) if good else None


def check_carried(point: Checkpoint) -> Iterator[Finding]:
    """Carried tensors byte for byte against the reference."""
    if point.reference is None:
        return
    ours, theirs = point.stored, point.reference
    pairs = [(rule.name, rule.source) for rule in point.rules.values()
             if not rule.quantized and rule.name in ours.tensors and rule.source in theirs.tensors]
    yield from broken("carried-bytes", ((name, "differs") for name, source in pairs
                                        if not _same_bytes(ours, name, theirs, source)))


def _same_bytes(left: ShardedSource, name: str, right: ShardedSource, source: str) -> bool:
    """Compare in pieces, so that a large embedding is never held whole."""
    one, other = left.tensors[name].entry, right.tensors[source].entry
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(torch.equal(left.read_slice(name, 0, *piece).view(torch.uint8),
                           right.read_slice(source, 0, *piece).view(torch.uint8)) for piece in row_pieces(one))


def row_pieces(entry: TensorEntry) -> list[tuple[int, int]]:
    """Ranges of a tensor's rows that take PIECE_BYTES at most, where a row does not take more; none of a scalar."""
    if not entry.shape:
        return []  # of which `carried-shape` tells
    rows = max(1, PIECE_BYTES * entry.shape[0] // max(1, entry.nbytes))
    return [(start, min(start + rows, entry.shape[0])) for start in range(0, entry.shape[0], rows)]
