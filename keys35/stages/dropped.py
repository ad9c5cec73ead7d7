"""Calibration windows that stop being finite on their way through the layers: left out of every statistic, by name.

One value that is not finite spoils its whole window in the next attention, so windows are what is dropped: from the
layer on that spoiled them, and wherever a whole pass needs them. The receipt of a layer's calibration pass lists all
that were dropped up to it.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from keys35.calibration.windows import Windows
from keys35.errors import SourceError
from keys35.report.measured import dropped_windows
from keys35.stages.job import Job
from keys35.stages.scan import broken_tensors
from keys35.stages.units import capture_unit

log = logging.getLogger(__name__)

SPLITS = ("fit", "selection")
MOST = 10  # one window in so many may be dropped, of each split


@dataclass(frozen=True)
class Dropped:
    """A window that is left out: which, of what text, and the layer whose output was not finite."""

    split: str
    window: int
    domain: str
    layer: int


def dropped_before(job: Job, layer: int) -> tuple[Dropped, ...]:
    """What a layer's pass leaves out from its start: by its own receipt if it was made before, else the last one's."""
    previous = min(layer, job.config.num_hidden_layers) - 1
    for known in (layer, previous) if layer else (layer,):
        receipt = job.work.receipt(capture_unit(known))
        if receipt is not None:
            return tuple(Dropped(**item) for item in receipt["data"].get("dropped", ()))
    return ()


def dropped_anywhere(job: Job) -> tuple[Dropped, ...]:
    """What no pass through the whole model can use: dropped by any layer so far."""
    return tuple(Dropped(**item) for item in dropped_windows(job.work))


def facts(dropped: Sequence[Dropped]) -> list[dict[str, object]]:
    """For a receipt."""
    return [asdict(item) for item in dropped]


def remaining(windows: Windows, split: str, dropped: Sequence[Dropped]) -> list[int]:
    """Numbers of the split's windows that are left, rising."""
    gone = {item.window for item in dropped if item.split == split}
    return [number for number in range(len(windows)) if number not in gone]


def left(windows: Mapping[str, Windows], dropped: Sequence[Dropped]) -> dict[str, Windows]:
    """The windows without those that are dropped, split by split."""
    return {split: part.only(remaining(part, split, dropped)) for split, part in windows.items()}


def drop(
    job: Job, layer: int, windows: Mapping[str, Windows], dropped: Sequence[Dropped],
    broken: Mapping[str, Sequence[int]],
) -> tuple[Dropped, ...]:
    """Those dropped so far and the ones a layer broke (numbers among what was left of each split).

    Raises SourceError, naming windows and any damaged weight behind them, if one is damaged, if they are more than a
    tenth of a split's windows, or a domain's last.
    """
    new = [Dropped(split, window, windows[split].domains[windows[split].domain[window]], layer)
           for split in SPLITS for window in _numbers(windows[split], split, dropped, broken[split])]
    total = (*dropped, *new)
    damaged = [str(item) for item in broken_tensors(job.source, _names(job, layer))]
    if damaged or _too_many(windows, total):
        reasons = damaged or ["no weight of it: the arithmetic overflows"]
        raise SourceError(
            f"layer {layer} gives values that are not finite in {_named(windows, new)}, because of:\n  "
            + "\n  ".join(reasons)
            + ("" if damaged else "\nAt most one window in ten is dropped, and no domain's last: look at that text "
               f"({job.work.path('calibration')} holds its tokens) and at the source")
        )
    job.work.log("dropped", windows=facts(new))
    log.warning("layer %d is not finite in %s: dropped", layer, _named(windows, new))
    return total


def _names(job: Job, layer: int) -> list[str]:
    return [rule.source for rule in job.rules.values() if rule.layer in (layer, None)]


def _numbers(windows: Windows, split: str, dropped: Sequence[Dropped], broken: Sequence[int]) -> list[int]:
    before = remaining(windows, split, dropped)
    return [before[index] for index in broken]


def _too_many(windows: Mapping[str, Windows], dropped: Sequence[Dropped]) -> bool:
    counts = Counter(item.split for item in dropped)
    kept = left(windows, dropped)
    return any(counts[split] * MOST > len(part) or set(part.domain.tolist()) != set(kept[split].domain.tolist())
               for split, part in windows.items())


def _named(windows: Mapping[str, Windows], dropped: Sequence[Dropped]) -> str:
    parts = []
    for split in SPLITS:
        mine = [f"{item.window} ({item.domain})" for item in dropped if item.split == split]
        if mine:
            parts.append(f"{len(mine)} of {len(windows[split])} {split} windows: {', '.join(mine)}")
    return " and ".join(parts)
