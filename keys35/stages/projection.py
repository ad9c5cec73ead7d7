"""A measured layer extrapolated to a whole model: GPU-hours, wall time on one and on eight GPUs, and bytes moved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keys35.files.atomic import read_json
from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, TensorRule, census
from keys35.recipe import Recipe, resource_dir
from keys35.stages.needs import rows_windows, sample_step
from keys35.stages.prefix_cost import PrefixSeconds, prefix_seconds
from keys35.stages.sizes import exl3_bytes

GPUS = 1, 8
MEASURED, BEHIND = "real-layer-h200.json", "prefix-layer-h200.json"
ASSUMPTIONS = (
    "every layer takes what the measured one took: the encoder by weights and widths, forward pass, Hessians and "
    "judging by calibration tokens, the rest by layer",
    "linears of another shape (dense, MTP) are encoded at the rate of routed experts",
    "layers are weighed by one copy with all errors and one each, through every later layer at the forward pass's rate",
    "with 8 GPUs all but the driver's forward pass is shared out evenly, and that pass runs beside it",
    "the disk keeps up: each GPU reads and writes what the measured one did in the same time",
    "validation is not included",
)


BEHIND_PREFIX = (
    "behind the quantized prefix passes, sums and rows take what they took in another measured layer, by calibration "
    "tokens; dense linears and passes wait for one another, a layer's experts are shared out"
)


@dataclass(frozen=True)
class Projection:
    """Hours unless a name says otherwise."""

    encode_hours: float
    sensitivity_hours: float
    other_hours: float
    wall_hours: Mapping[int, float]
    read_gb: float
    written_gb: float
    prefix_hours: float = 0.0
    """Passes, sums and solves behind a quantized prefix; its encodings are among `encode_hours`."""

    @property
    def gpu_hours(self) -> float:
        """On one GPU, everything after another."""
        return self.encode_hours + self.sensitivity_hours + self.other_hours + self.prefix_hours

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What has to hold for the hours to."""
        return (*ASSUMPTIONS, BEHIND_PREFIX) if self.prefix_hours else ASSUMPTIONS

    def facts(self) -> dict[str, Any]:
        """JSON values, with the assumptions."""
        return {
            "gpu_hours": round(self.gpu_hours, 2),
            "encode_hours": round(self.encode_hours, 2),
            "sensitivity_hours": round(self.sensitivity_hours, 2),
            "wall_hours": {str(gpus): round(hours, 2) for gpus, hours in self.wall_hours.items()},
            "read_gb": round(self.read_gb),
            "written_gb": round(self.written_gb),
            "assumptions": list(self.assumptions),
        } | ({"prefix_hours": round(self.prefix_hours, 2)} if self.prefix_hours else {})

    def text(self) -> str:
        """For people."""
        walls = ", ".join(f"{hours:.1f} h on {gpus} GPU{'s' * (gpus > 1)}" for gpus, hours in self.wall_hours.items())
        behind = f", {self.prefix_hours:.1f} the quantized prefix" if self.prefix_hours else ""
        lines = [
            f"{self.gpu_hours:.1f} GPU-hours from a measured layer, {self.encode_hours:.1f} of them the encoder and "
            f"{self.sensitivity_hours:.1f} the layers' weights{behind}; {walls}; {self.read_gb:,.0f} GB read, "
            f"{self.written_gb:,.0f} GB written. Assumed:",
            *(f"- {assumption}" for assumption in self.assumptions),
        ]
        return "\n".join(lines)


def simulated_hours(config: GlmConfig, recipe: Recipe) -> float | None:
    """What the whole job would take with predicted costs, in GPU-hours; None where they are, or nothing is known."""
    if recipe.experts.measure == "predicted":
        return None
    experts = recipe.experts.model_copy(update={"measure": "predicted"})
    found = projected(config, recipe.model_copy(update={"experts": experts}))
    return found.gpu_hours if found else None


def projected(config: GlmConfig, recipe: Recipe) -> Projection | None:
    """From the layer that the shipped benchmark measured; None where it is not at hand."""
    folder = resource_dir("benchmarks", "reports/benchmarks")
    needed = [folder / name for name in (MEASURED, BEHIND)[: 1 + (recipe.encoder.prefix == "quantized")]]
    if not all(path.is_file() for path in needed):
        return None
    measured, *behind = (read_json(path) for path in needed)
    return project(measured, config, recipe, *behind)


def project(
    measured: Mapping[str, Any], config: GlmConfig, recipe: Recipe,
    behind: Mapping[str, Any] | None = None,
) -> Projection:
    """From a measured layer, as reports/benchmarks/real-layer-h200.json has it, to a model and its recipe.

    behind: another, as prefix-layer-h200.json has it, needed for a quantized prefix.
    """
    rules = list(census(config).values())
    passes = list(encoder_passes(rules, config, recipe))
    a_weight = 1e-6 / (behind if _is_behind(recipe) else measured)["encode_mws_a_width"]
    encode = a_weight * sum(_padded(rule) * times for rule, times in passes)
    choice, layers = recipe.calibration, len(config.layers)
    forward, other = (layers * seconds for seconds in _measuring(measured, recipe, behind))
    a_token = measured["seconds"]["forward"] / sum(measured["tokens"][split] for split in ("fit", "selection"))
    weighing = _copies(config) * a_token * choice.sensitivity_windows * choice.window
    prefix = PrefixSeconds()
    alone = 0.0  # what no second GPU makes faster
    if recipe.encoder.prefix == "quantized":
        prefix = prefix_seconds(behind, config, recipe)
        alone = prefix.alone + a_weight * sum(_padded(rule) for rule, _ in passes if rule.role is Role.DENSE)
    spread = encode + other + weighing
    behind_it = prefix.alone + prefix.shared
    shared = spread + behind_it - alone
    several = alone + prefix.waiting
    wall = {n: (spread + forward + behind_it if n == 1 else max(shared / n, forward) + several) / 3600 for n in GPUS}
    return Projection(
        encode / 3600, weighing / 3600, (forward + other) / 3600, wall, *_bytes(rules, config, recipe),
        behind_it / 3600,
    )


def _is_behind(recipe: Recipe) -> bool:
    """Whether experts are encoded behind a quantized prefix and, but for a sample, nowhere else."""
    return recipe.experts.measure == "predicted" and recipe.encoder.prefix == "quantized"


def _measuring(
    measured: Mapping[str, Any], recipe: Recipe, behind: Mapping[str, Any] | None
) -> tuple[float, float]:
    """Seconds of a layer's forward pass, and of all else that measures it but for the encoder."""
    choice, tokens, spent, again = recipe.calibration, measured["tokens"], measured["seconds"], 0.0
    whole, fit = measured["layer_seconds"], choice.fit_windows * choice.window / tokens["fit"]
    if _is_behind(recipe):
        tokens, spent = behind["tokens"], behind["measuring"]
        whole, fit = spent["all"], rows_windows(recipe) * choice.window / tokens["measured on"]
    every = (choice.fit_windows + choice.selection_windows) * choice.window / (tokens["fit"] + tokens["selection"])
    forward, judged = spent["forward"] * every, choice.selection_windows * choice.window / tokens["selection"]
    if recipe.experts.measure == "predicted" and not _is_behind(recipe):  # another pass for rows to encode on
        again = measured["predicted_run"]["seconds"]["simulation"] + spent["reading"] + forward
    fixed = whole - sum(spent[kind] for kind in ("encode", "forward", "Hessians", "judging"))
    return forward, spent["Hessians"] * fit + spent["judging"] * judged + fixed + again


def _copies(config: GlmConfig) -> int:
    """Layers that all copies go through when layers are weighed: one without errors, one with them, one a MoE layer."""
    last, weighed = config.num_hidden_layers, list(config.moe_layers)
    return last + sum(last - layer for layer in [weighed[0], *weighed])


def encoder_passes(
    rules: Iterable[TensorRule], config: GlmConfig, recipe: Recipe
) -> Iterable[tuple[TensorRule, float]]:
    """Linears and how often each is encoded: an expert at each candidate width, and behind a quantized prefix again.

    Where costs are predicted a sample is encoded at all widths, and every expert once.
    """
    widths, again = len(recipe.experts.widths), recipe.encoder.prefix == "quantized"
    experts = widths / sample_step(config, recipe) + 1 if recipe.experts.measure == "predicted" else widths + again
    widths = {Role.EXPERT: experts, Role.MTP_EXPERT: 1, Role.DENSE: 1, Role.CARRIED: 0}
    return ((rule, widths[rule.role]) for rule in rules if rule.quantized)


def _padded(rule: TensorRule) -> int:
    return rule.padded[0] * rule.padded[1]


def _bytes(rules: list[TensorRule], config: GlmConfig, recipe: Recipe) -> tuple[float, float]:
    """GB: every weight read for the forward pass and again for its encoding; candidates and the output written.

    Where experts are encoded once more, read again and written beside what was measured: behind a quantized prefix, a
    pass and one more of all but the experts, or where costs were predicted, a pass. Predicted ones have a sample's
    candidates only.
    """
    prefix, predicted = recipe.encoder.prefix == "quantized", recipe.experts.measure == "predicted"
    again = prefix or predicted
    read = sum(rule.nbytes * (1 + rule.quantized + again * (1 + (rule.role is Role.EXPERT))
                              + (prefix and rule.expert is None)) for rule in rules)
    candidates = sum(recipe.experts.widths) / sample_step(config, recipe)
    bits = {Role.EXPERT: candidates, Role.MTP_EXPERT: recipe.mtp.bits, Role.DENSE: recipe.dense.bits}
    final = {**bits, Role.EXPERT: recipe.experts.budget}
    encoded = [rule for rule in rules if rule.quantized]
    written = sum(float(exl3_bytes(rule, bits[rule.role]) + exl3_bytes(rule, final[rule.role])) for rule in encoded)
    written += sum(rule.nbytes for rule in rules if not rule.quantized)
    written += again * sum(float(exl3_bytes(rule, final[rule.role])) for rule in encoded if rule.role is Role.EXPERT)
    return read / 1e9, written / 1e9
