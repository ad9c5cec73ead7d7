"""Encoded layers as weights: experts read from the work directory and decoded on demand, dense linears at once."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from keys35.exl3.linear import decode_weight
from keys35.glm.block import LayerWeights
from keys35.glm.names import PROJECTIONS, Role
from keys35.glm.weights import Keep, Overlay, StoredLayer, WeightStore
from keys35.stages.job import Job
from keys35.stages.units import (
    ExpertUnit,
    dense_file,
    dense_home,
    dense_unit,
    encoded_last,
    expert_units,
    final_units,
    load_recorded,
    weighed,
)

READERS = 4


class Candidates:
    """All encodings of a layer's routed experts; raises ResumeError when a unit is missing or its file damaged."""

    def __init__(self, job: Job, layer: int, final: bool = False):
        """final: as the checkpoint gets them, each at its one width; otherwise as they were measured."""
        self._job = job
        self._layer = layer
        self.device = job.device
        units = final_units(job, layer) if final else expert_units(job, layer)
        self._units = {expert: unit for unit in units for expert in unit.experts}
        self._home = job.device if final else torch.device("cpu")  # final ones are passed by many runs of windows
        self._group = lru_cache(maxsize=None)(self._load)  # of the layer: all of them are asked for again and again
        self._held: dict[tuple[ExpertUnit, int], dict[str, Tensor]] = {}

    def hold(self, widths: Sequence[int | None]) -> None:
        """Read the whole layer at these widths now, several files at a time, and keep it in memory."""
        wanted = {(self._units[expert], width) for expert, width in enumerate(widths) if width is not None}
        with ThreadPoolExecutor(READERS) as pool:
            self._held |= dict(zip(wanted, pool.map(lambda pair: self._load(*pair), wanted), strict=True))

    def encoded(self, expert: int, projection: str, width: int) -> dict[str, Tensor]:
        """Stored parts of one linear: trellis, suh, svh, mul1."""
        unit = self._units[expert]
        group = self._held.get((unit, width)) or self._group(unit, width)
        module = f"model.layers.{self._layer}.mlp.experts.{expert}.{projection}"
        return {part: group[f"{module}.{part}"] for part in ("trellis", "suh", "svh", "mul1")}

    def overlay(self, base: LayerWeights, widths: Sequence[int | None]) -> Overlay:
        """The layer with every routed expert at its given width; None: as the source has it."""
        return Overlay(base, self.decoded(widths))

    def decoded(self, widths: Sequence[int | None]) -> Mapping[str, Tensor]:
        """Matrices (in, out) of the experts that have a width, float32, each decoded when asked for."""
        return _Decoded(self, widths)

    def _load(self, unit: ExpertUnit, width: int) -> dict[str, Tensor]:
        parts = load_recorded(self._job, unit.name, unit.file(self._job, width))
        return {name: part.to(self._home) for name, part in parts.items()}


def are_held(job: Job, widths: Mapping[int, Sequence[int]]) -> bool:
    """Whether every routed expert's encoding at the given width (layer -> width per expert) is on disk."""
    for layer, row in widths.items():
        for unit in expert_units(job, layer):
            held = job.work.require(unit.name)["data"]["held"]
            if any(expert not in held.get(str(row[expert]), []) for expert in unit.experts):
                return False
    return True


class MixStore(WeightStore):
    """The model with dense linears and MTP experts as they end up and routed experts at any given widths.

    only_experts: everything but the given experts as the source has it; a width of None too. final: the experts are
    the checkpoint's own, in its own encoding; otherwise they are as they were measured. first: what is encoded anew
    behind a layer's experts is as it was before them.
    """

    def __init__(
        self, job: Job, widths: Mapping[int, list[float | None]], only_experts: bool = False, final: bool = False,
        first: bool = False,
    ):
        super().__init__(job.source, job.config, device=job.device)
        self._job, self._only_experts, self._final, self._first = job, only_experts, final, first
        mtp = {} if only_experts else {layer: [job.recipe.mtp.bits] * job.experts for layer in job.config.mtp_layers}
        self._widths = {**widths, **mtp}

    def layer(self, layer: int, keep: Keep = Keep.DENSE) -> LayerWeights:
        """One layer over its carried tensors: dense linears decoded now, experts when asked for.

        A GPU holds the checkpoint's own experts as they are encoded.
        """
        dense = self.without_experts(layer, keep)
        if layer not in self._widths:
            return dense
        final = self._final or self.config.is_mtp(layer)
        candidates, widths = Candidates(self._job, layer, final), self._widths[layer]
        if final and self.device.type == "cuda":
            candidates.hold(widths)
        return candidates.overlay(dense, widths)

    def without_experts(self, layer: int, keep: Keep = Keep.DENSE) -> LayerWeights:
        """One layer of which no routed expert will be asked for: those may not be there yet."""
        dense = super().layer(layer, keep)
        return dense if self._only_experts else Overlay(dense, self._dense(layer))

    def _dense(self, layer: int) -> dict[str, Tensor]:
        rules = [rule for rule in self._job.rules.values() if rule.layer == layer and rule.role is Role.DENSE]
        stored, matrices = {}, {}
        for unit, path in self._homes(layer) if rules else ():
            stored |= load_recorded(self._job, unit, path)
        for rule in rules:
            parts = (stored[f"{rule.module}.{part}"].to(self.device) for part in ("trellis", "suh", "svh"))
            matrix = decode_weight(*parts)[: rule.in_features, : rule.out_features]
            matrices[rule.module.split(".", 3)[3]] = matrix.contiguous()  # as it was when its layer was encoded
        return matrices

    def _homes(self, layer: int) -> Iterator[tuple[str, Path]]:
        """Receipts and files of a layer's dense linears; of one that two have, the later counts."""
        yield dense_unit(layer), dense_file(self._job, layer)
        if not self._first and (rule := encoded_last(self._job, layer)):
            yield dense_home(self._job, rule)


class Floats(Mapping[str, Tensor]):
    """Matrices that are held in another dtype or elsewhere, float32 on a device when asked for."""

    def __init__(self, held: Mapping[str, Tensor], device: torch.device):
        self._held, self._device = held, device

    def __getitem__(self, module: str) -> Tensor:
        return self._held[module].to(self._device).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def simulated(job: Job, layer: int) -> Floats:
    """Matrices (in, out) of a layer's simulated experts that are kept, on the job's device when asked for.

    By relative module name; raises ResumeError when a unit is missing or its file damaged.
    """
    units = [unit for unit in expert_units(job, layer) if weighed(job, unit)]
    stored = [load_recorded(job, unit.name, unit.simulated_file(job)) for unit in units]
    return Floats({name.split(".", 3)[3]: part for tensors in stored for name, part in tensors.items()}, job.device)


class Doubled(Mapping[str, Tensor]):
    """Matrices (in, out) with twice the errors that given ones have against a layer's own."""

    def __init__(self, exact: StoredLayer, lossy: Mapping[str, Tensor]):
        self._exact, self._lossy = exact, lossy

    def __getitem__(self, module: str) -> Tensor:
        return 2 * self._lossy[module] - self._exact.tensor(f"{module}.weight").T

    def __iter__(self) -> Iterator[str]:
        return iter(self._lossy)

    def __len__(self) -> int:
        return len(self._lossy)


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
        return (f"mlp.experts.{e}.{leaf}" for e, width in enumerate(self._widths) if width is not None
                for leaf in PROJECTIONS)

    def __len__(self) -> int:
        return sum(width is not None for width in self._widths) * len(PROJECTIONS)
