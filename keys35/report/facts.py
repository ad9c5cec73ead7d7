"""Everything the page and the card show, read from report files; they format it and compute nothing else."""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from keys35.errors import ContractError
from keys35.files.atomic import read_json
from keys35.files.ledger import Workdir
from keys35.recipe import set_name
from keys35.report.measured import MAKING, MEASUREMENTS, finished_checkpoint, making, measurements
from keys35.report.schema import QUALITY, REPORT, read_report

QUANT = "quantization_config.json"
CONFIGS = "config.json", QUANT
REDO = "give a work directory or a finished checkpoint; if it is one, assemble it again"
RANDOM = "random-"
FINGERPRINT = re.compile(r"(\d+) bytes, ")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

ROUTED, MTP, OTHER = "routed experts", "MTP experts", "norms and the rest"
CLASSES = (
    (re.compile(r"\.mlp\.experts\."), ROUTED),
    (re.compile(r"norm"), OTHER),
    (re.compile(r"\.self_attn\.indexer\."), "indexer"),
    (re.compile(r"\.self_attn\.kv_b_proj"), "attention kv_b"),
    (re.compile(r"\.self_attn\."), "attention"),
    (re.compile(r"\.mlp\.shared_experts\."), "shared experts"),
    (re.compile(r"\.mlp\.gate\b"), "router"),
    (re.compile(r"\.mlp\."), "dense MLP"),
    (re.compile(r"embed_tokens|lm_head"), "embedding and head"),
)


@dataclass(frozen=True)
class ClassBytes:
    """Stored bytes of one class of tensors; `bits` is the exact mean over its trellises, None if carried."""

    name: str
    tensors: int
    nbytes: int
    bits: Fraction | None


@dataclass(frozen=True)
class Facts:
    """The report files as found; None or empty is what a checkpoint or work directory does not have (yet)."""

    name: str
    report: dict[str, Any] | None = None
    quality: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    making: dict[str, Any] | None = None
    classes: tuple[ClassBytes, ...] = ()
    widths: dict[int, list[float]] = field(default_factory=dict)
    """Layer -> bits per routed expert, without MTP layers."""
    profile: str = "per-expert"

    @property
    def total_bytes(self) -> int:
        return sum(row.nbytes for row in self.classes)

    @property
    def counts(self) -> dict[float, int]:
        """Routed experts per width."""
        return dict(sorted(Counter(bits for row in self.widths.values() for bits in row).items()))

    @property
    def routed_mean(self) -> Fraction | None:
        """Exact mean width of the routed experts, from the trellis shapes where there is a checkpoint."""
        for row in self.classes:
            if row.name == ROUTED:
                return row.bits
        bits = [b for row in self.widths.values() for b in row]
        return Fraction(sum(bits)) / len(bits) if bits else None  # a sum of half rates is a float, and exact

    @property
    def mixed(self) -> bool:
        """Whether experts of one layer differ in width."""
        return any(len(set(row)) > 1 for row in self.widths.values())

    @property
    def source_bytes(self) -> int:
        """Bytes of the source's shards, 0 if unknown; a fingerprint begins "<bytes> bytes, ..."."""
        prints = (self.report or {}).get("source_fingerprint", {}).values()
        return sum(int(found[1]) for text in prints if (found := FINGERPRINT.match(text)))

    @property
    def baselines(self) -> dict[str, dict[str, Any]]:
        """Metrics per set of widths, only those judged on the panel of the quality report."""
        scored = (self.measured or {}).get("baselines", {})
        panel = self.quality["panel"]["sha256"] if self.quality else None
        return {name: entry["metrics"] for name, entry in scored.items() if entry["panel_sha256"] == panel}

    @property
    def behind_prefix(self) -> bool:
        """Whether the checkpoint was encoded behind a quantized prefix, which its baselines were not."""
        return (self.report or {}).get("recipe", {}).get("encoder", {}).get("prefix") == "quantized"

    @property
    def random_kl(self) -> list[float]:
        """KL of the random mixes, rising."""
        return sorted(m["kl"] for name, m in self.baselines.items() if name.startswith(RANDOM))


def facts_of_checkpoint(out: Path) -> Facts:
    """Read a finished checkpoint's report files; raises ContractError if the two that must exist are damaged."""
    report = read_report(out / REPORT, REDO)
    quantization = read_json(out / QUANT, ContractError, REDO)
    try:
        widths = {int(layer): _row(row) for layer, row in quantization["expert_bits"].items()
                  if layer in report["widths_by_layer"]}
        classes = _classes(quantization["tensor_storage"], set(widths))
        name = str(report["recipe"]["name"])
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ContractError(f"{out}: its report or {QUANT} lacks {error}; {REDO}") from error
    optional = [_optional(out / file) for file in (QUALITY, MEASUREMENTS, MAKING)]
    return Facts(name, report, *optional, classes, widths, quantization.get("profile", "per-expert"))


def _row(widths: Any) -> list[float]:
    """A layer's bits per expert; ValueError or TypeError where they are not numbers, or there are none."""
    if not widths or not all(width > 0 for width in widths):
        raise ValueError("widths of a layer's experts")
    return widths


def of_another_job(report: dict[str, Any], work: Workdir) -> list[str]:
    """What a checkpoint's report has otherwise than a work directory's job: source, recipe but the panel, text."""
    made_from = {"source": report.get("source_fingerprint"), "recipe": _shaping(report.get("recipe", {})),
                 "calibration_text": report.get("calibration_text_sha256")}
    job = work.job | {"recipe": _shaping(work.job.get("recipe", {}))}
    return [key for key, value in made_from.items() if job.get(key) != value]


def _shaping(recipe: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe without its panel, which only judges, and with its set of text as a checkpoint names it."""
    calibration = recipe.get("calibration")
    named = isinstance(calibration, dict) and isinstance(calibration.get("set"), str)
    part = {"calibration": calibration | {"set": set_name(calibration["set"])}} if named else {}
    return {key: value for key, value in recipe.items() if key != "panel"} | part


def facts_of_work(root: Path) -> Facts:
    """Read a work directory, finished or not, and its checkpoint if that exists; raises ResumeError without a job.

    A folder that holds another job's checkpoint by now has none of it.
    """
    work = Workdir.open(root, None)
    found, made = measurements(work), making(work)
    out = finished_checkpoint(work)
    if out is not None and (out / REPORT).is_file():
        base = facts_of_checkpoint(out)
        if not of_another_job(base.report, work):
            return replace(base, measured=found, making=made)
    widths = {int(layer): row["chosen"] for layer, row in found["layers"].items() if "chosen" in row}
    return Facts(work.job["recipe"]["name"], measured=found, making=made, widths=widths)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_report(path, "delete it and run `keys35 report` again") if path.is_file() else None


def _classes(storage: dict[str, Any], routed_layers: set[int]) -> tuple[ClassBytes, ...]:
    """Bytes per class from the stored shapes; encoded and carried tensors of a kind are rows of their own."""
    tensors, nbytes = Counter(), Counter()
    bits, weights = Counter(), Counter()
    for module, entry in storage.items():
        key = (_class_of(module, routed_layers), "trellis" in "".join(entry["stored_tensors"]))
        for name, tensor in entry["stored_tensors"].items():
            tensors[key] += 1
            nbytes[key] += tensor["n_bytes"]
            if name.endswith(".trellis"):
                rows, columns, words = tensor["shape"]
                bits[key] += rows * columns * words * 16
                weights[key] += rows * columns * 256
    rows = [ClassBytes(name, tensors[name, encoded], nbytes[name, encoded],
                       Fraction(bits[name, encoded], weights[name, encoded]) if encoded else None)
            for name, encoded in tensors]
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.name)))


def _class_of(module: str, routed_layers: set[int]) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", module)
    for pattern, name in CLASSES:
        if pattern.search(module):
            return MTP if name == ROUTED and layer and int(layer[1]) not in routed_layers else name
    return OTHER
