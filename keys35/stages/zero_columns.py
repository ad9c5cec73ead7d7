"""Output columns that svh makes zero: right where the source's rows are, which the assembly report says for whoever
checks a checkpoint without its source.
"""

from collections.abc import Iterable

from torch import Tensor

from keys35.files.source import ShardedSource
from keys35.glm.names import TensorRule, exl3_parts


def zero_columns(rule: TensorRule, svh: Tensor) -> list[int]:
    """Columns without padding that are zero, of a linear's svh (padded out_features,)."""
    return (svh[: rule.out_features] == 0).nonzero().flatten().tolist()


def lost_columns(rule: TensorRule, columns: list[int], source: ShardedSource) -> list[int]:
    """Those of the zero columns that are none in the source, whose weight (out, in) has them as rows."""
    if not columns:
        return []
    weight = source.read(rule.source)
    return [column for column in columns if column >= len(weight) or weight[column].count_nonzero()]


def zero_in_source(rules: Iterable[TensorRule], stored: ShardedSource, source: ShardedSource) -> dict[str, int]:
    """How many zero columns of each encoded linear's svh the source has, by the svh's name; linears with none do
    without."""
    found = {}
    for rule in rules:
        name = exl3_parts(rule.module)["svh"]
        columns = zero_columns(rule, stored.read(name))
        found[name] = len(columns) - len(lost_columns(rule, columns, source))
    return {name: count for name, count in found.items() if count}
