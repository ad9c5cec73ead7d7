"""Encoded experts of one layer, read from the work directory and decoded on demand."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from keys35.exl3.linear import decode_weight
from keys35.glm.block import LayerWeights
from keys35.glm.names import PROJECTIONS
from keys35.glm.weights import Overlay
from keys35.stages.job import Job
from keys35.stages.units import ExpertUnit, expert_units, load_recorded, sampled

GROUPS_IN_MEMORY = 4
READERS = 4


class Candidates:
    """All encodings of a layer's routed experts; raises ResumeError when a unit is missing or its file damaged."""

    def __init__(self, job: Job, layer: int):
        self._job = job
        self._layer = layer
        self.device = job.device
        self._units = {expert: unit for unit in expert_units(job, layer) for expert in unit.experts}
        self._group = lru_cache(maxsize=GROUPS_IN_MEMORY * len(job.recipe.experts.widths))(self._load)
        self._held: dict[tuple[ExpertUnit, int], dict[str, Tensor]] = {}

    def hold(self, width: int) -> None:
        """Read all of the layer that is encoded at one width now, several files at a time, and keep it in memory."""
        units = [unit for unit in expert_units(self._job, self._layer) if sampled(self._job, unit)]
        with ThreadPoolExecutor(READERS) as pool:
            groups = pool.map(lambda unit: self._load(unit, width), units)
            self._held |= {(unit, width): group for unit, group in zip(units, groups, strict=True)}

    def encoded(self, expert: int, projection: str, width: int) -> dict[str, Tensor]:
        """Stored parts of one linear: trellis, suh, svh, mul1."""
        unit = self._units[expert]
        group = self._held.get((unit, width)) or self._group(unit, width)
        module = f"model.layers.{self._layer}.mlp.experts.{expert}.{projection}"
        return {part: group[f"{module}.{part}"] for part in ("trellis", "suh", "svh", "mul1")}

    def overlay(self, base: LayerWeights, widths: Sequence[int | None]) -> Overlay:
        """The layer with every routed expert at its given width; None: as the source has it."""
        return Overlay(base, _Decoded(self, widths))

    def _load(self, unit: ExpertUnit, width: int) -> dict[str, Tensor]:
        return load_recorded(self._job, unit.name, unit.file(self._job, width))


def are_held(job: Job, widths: Mapping[int, Sequence[int]]) -> bool:
    """Whether every routed expert's encoding at the given width (layer -> width per expert) is on disk."""
    for layer, row in widths.items():
        for unit in expert_units(job, layer):
            held = job.work.require(unit.name)["data"]["held"]
            if any(expert not in held.get(str(row[expert]), []) for expert in unit.experts):
                return False
    return True


class _Decoded(Mapping[str, Tensor]):
    """Decoded (in, out) matrices of a layer's experts by relative module name."""

    def __init__(self, candidates: Candidates, widths: Sequence[int | None]):
        self._candidates = candidates
        self._widths = widths

    def __getitem__(self, module: str) -> Tensor:
        parts = module.split(".")
        if parts[:2] != ["mlp", "experts"] or self._widths[int(parts[2])] is None:
            raise KeyError(module)
        expert = int(parts[2])
        stored = self._candidates.encoded(expert, parts[3], self._widths[expert])
        trellis, suh, svh = (stored[part].to(self._candidates.device) for part in ("trellis", "suh", "svh"))
        return decode_weight(trellis, suh, svh).to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return (f"mlp.experts.{e}.{leaf}" for e in range(len(self._widths)) for leaf in PROJECTIONS)

    def __len__(self) -> int:
        return len(self._widths) * len(PROJECTIONS)
