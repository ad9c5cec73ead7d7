"""Units of work: their names, files and receipts. A unit is done or not; nothing in between survives a kill."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from keys35.errors import ResumeError
from keys35.files.atomic import load_tensors
from keys35.glm.names import PROJECTIONS, Role, TensorRule
from keys35.recipe import Recipe
from keys35.stages.job import Job
from keys35.stages.needs import ENCODED_TWICE, WEIGHED, sample_step

CALIBRATION = "measure/calibration"
SENSITIVITY = "measure/sensitivity"
MEASURED, FINAL = "experts", "final"  # experts as they were measured, and encoded anew behind a quantized prefix


@dataclass(frozen=True)
class ExpertUnit:
    """A group of routed experts of one layer, encoded together."""

    layer: int
    experts: range
    folder: str = MEASURED

    @property
    def name(self) -> str:
        """The unit's receipt in the ledger."""
        return f"{self.folder}/{layer_name(self.layer)}/{self.experts.start:04d}"

    def file(self, job: Job, width: int) -> Path:
        """Where the group's encodings at one width are kept."""
        return job.work.path(self.folder, layer_name(self.layer), f"{self.experts.start:04d}-k{width}.safetensors")

    def simulated_file(self, job: Job) -> Path:
        """Where those of a predicted measurement's simulated experts are kept that layer weights perturb."""
        return job.work.path(self.folder, layer_name(self.layer), f"{self.experts.start:04d}-simulated.safetensors")


def layer_name(layer: int) -> str:
    """How a layer is called in file and unit names."""
    return f"layer-{layer:03d}"


def expert_units(job: Job, layer: int) -> list[ExpertUnit]:
    """The units of one MoE layer, in order."""
    return [ExpertUnit(layer, group) for group in job.expert_groups()]


def final_units(job: Job, layer: int) -> list[ExpertUnit]:
    """The units that hold a MoE layer's experts as the checkpoint gets them."""
    if job.recipe.encoder.prefix == "source":
        return expert_units(job, layer)
    return [ExpertUnit(layer, group, FINAL) for group in job.expert_groups()]


def by_width(unit: ExpertUnit, widths: Sequence[int]) -> dict[int, list[int]]:
    """A unit's experts by width, given the width of every expert of its layer."""
    chosen: dict[int, list[int]] = {}
    for expert in unit.experts:
        chosen.setdefault(widths[expert], []).append(expert)
    return chosen


def not_held(data: Mapping[str, Any], chosen: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Of what is chosen for a unit (width -> experts), the widths of which its receipt's data lacks an expert."""
    held = data["held"]
    return {width: experts for width, experts in chosen.items() if not set(experts) <= set(held.get(str(width), []))}


def sampled(job: Job, unit: ExpertUnit) -> list[int]:
    """Those of a unit's experts that `measure` encodes: all, or for a predicted measurement one in `experts.sample`."""
    return _spread(unit, sample_step(job.config, job.recipe) if is_predicted(job, unit.layer) else 1)


def weighed(job: Job, unit: ExpertUnit) -> list[int]:
    """Those of a unit's experts that layer weights perturb: all, or some of those that are only simulated."""
    return _spread(unit, -(-job.experts // WEIGHED) if is_predicted(job, unit.layer) else 1)


def _spread(unit: ExpertUnit, step: int) -> list[int]:
    return [expert for expert in unit.experts if expert % step == unit.layer % step]


def is_predicted(job: Job, layer: int) -> bool:
    """Whether `measure` simulates a layer's experts and encodes a sample only."""
    return job.recipe.experts.measure == "predicted" and not job.config.is_mtp(layer)


def middle_width(recipe: Recipe) -> tuple[int, int]:
    """Index and value of the candidate width that layers are perturbed with, and experts simulated at."""
    middle = len(recipe.experts.widths) // 2
    return middle, recipe.experts.widths[middle]


def unit_rules(job: Job, unit: ExpertUnit, experts: Iterable[int] | None = None) -> list[TensorRule]:
    """The linears of a group of experts, or of some of them."""
    chosen = unit.experts if experts is None else experts
    names = [f"model.layers.{unit.layer}.mlp.experts.{e}.{leaf}.weight" for e in chosen for leaf in PROJECTIONS]
    return [job.rules[name] for name in names]


def capture_unit(layer: int) -> str:
    """Receipt of a layer's calibration pass."""
    return f"measure/capture/{layer_name(layer)}"


def sensitivity_unit(part: int) -> str:
    """Receipt of a few windows' pass through every perturbed copy of the model."""
    return f"{SENSITIVITY}/part-{part:03d}"


def dense_unit(layer: int) -> str:
    """Receipt of a layer's fixed-width dense linears."""
    return f"quantize/dense/{layer_name(layer)}"


def dense_file(job: Job, layer: int) -> Path:
    """Where a layer's encoded dense linears are kept."""
    return job.work.path("dense", f"{layer_name(layer)}.safetensors")


def shared_unit(layer: int) -> str:
    """Receipt of the linear that `encoded_last` names."""
    return f"quantize/shared/{layer_name(layer)}"


def encoded_last(job: Job, layer: int) -> TensorRule | None:
    """The shared expert's down projection of a layer behind a quantized prefix: encoded anew behind the experts.

    None where it is encoded with the other dense linears for good, as the MTP layer's, or not at all.
    """
    rule = job.rules.get(f"model.layers.{layer}.{ENCODED_TWICE}")
    due = job.recipe.encoder.prefix == "quantized" and layer in job.config.moe_layers
    return rule if due and rule is not None and rule.role is Role.DENSE else None


def dense_home(job: Job, rule: TensorRule) -> tuple[str, Path]:
    """Receipt and file of a dense linear as the checkpoint has it."""
    if encoded_last(job, rule.layer) == rule:
        return shared_unit(rule.layer), job.work.path("dense", f"{layer_name(rule.layer)}-shared.safetensors")
    return dense_unit(rule.layer), dense_file(job, rule.layer)


def recorded_entry(job: Job, receipt: dict[str, Any] | None, path: Path) -> dict[str, Any] | None:
    """What a receipt has of one of its unit's files, None if it has nothing."""
    name = path.relative_to(job.work.root).as_posix()
    return next((entry for entry in receipt["files"] if entry["path"] == name), None) if receipt else None


def recorded_sha256(job: Job, unit: str, path: Path) -> str:
    """The hash a unit's receipt has for one of its files; raises ResumeError when there is none."""
    entry = recorded_entry(job, job.work.receipt(unit), path)
    if entry is None:
        raise ResumeError(f"{unit} is missing or damaged in {job.work.root}: run `keys35 measure` on it again")
    return entry["sha256"]


def load_recorded(job: Job, unit: str, path: Path) -> dict[str, Tensor]:
    """A finished unit's tensors; raises ResumeError if the file is not, byte for byte, what the receipt recorded."""
    return load_tensors(path, expect_sha256=recorded_sha256(job, unit, path))
