"""The recipe: every choice that shapes the output, validated before any work, loaded from TOML."""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from keys35 import __version__
from keys35.errors import Keys35Error, RecipeError

INTEGER_WIDTHS = frozenset(range(1, 9))
EXPERT_WIDTHS = INTEGER_WIDTHS | {1.5, 2.5, 3.5}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) (GB|GiB)")
PLAIN_BITS = 16  # what a config calls a tensor that is not encoded


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Origin(_Section):
    """How the source is read."""

    fp8: bool = Field(False, description="read FP8 weights with block scales as BF16; the result inherits their loss")


class Experts(_Section):
    """Routed experts: candidate widths and the mean to hit exactly, in bits per weight."""

    widths: tuple[int | float, ...] = Field(
        (2, 3, 4), description="candidate widths, rising: 1 to 8, and the half rates 1.5, 2.5, 3.5 where readers allow"
    )
    bits: float | str = Field(
        2.75,
        description='the exact mean: a decimal, a fraction ("206/75"), or what the checkpoint may weigh ("276.1 GB")',
    )
    scope: Literal["model", "layer"] = Field("model", description="where the mean holds: over all layers, or in each")
    fairness: float = Field(
        0.5, ge=0, le=1, description="share of the mean gain over a random mix that every domain must get; 0: none"
    )
    fallback: bool = Field(
        True, description="a safe random mix where held-out text says that experts' costs mislead, or lacks domains"
    )
    measure: Literal["encoded", "predicted"] = Field(
        "encoded", description="encode every expert to learn its costs, or simulate encodings and check a sample"
    )
    sample: int = Field(64, ge=1, description="a predicted measurement encodes one expert in so many of each layer")
    group: int = Field(8, ge=1, description="experts per unit of work")

    @field_validator("widths")
    @classmethod
    def _legal_widths(cls, widths: tuple[int | float, ...]) -> tuple[int | float, ...]:
        if not widths or any(w not in EXPERT_WIDTHS for w in widths):
            raise ValueError(f"widths must be whole bits from 1 to 8, or 1.5, 2.5, 3.5, found {list(widths)}")
        widths = tuple(int(w) if w == int(w) else w for w in widths)  # 3.0 and 3 are one width, with one file name
        if list(widths) != sorted(set(widths)):
            raise ValueError(f"widths must rise without repeats, found {list(widths)}")
        return widths

    @field_validator("bits")
    @classmethod
    def _exact(cls, bits: float | str) -> float | str:
        try:
            SIZE.fullmatch(str(bits)) or Fraction(str(bits))
        except (ValueError, ZeroDivisionError):
            raise ValueError('bits must be a number, a fraction ("206/75") or a size ("276.1 GB")') from None
        return bits

    @model_validator(mode="after")
    def _budget_within_widths(self) -> "Experts":
        if self.size is None and not self.widths[0] <= self.budget <= self.widths[-1]:
            raise ValueError(f"bits = {self.bits} lies outside the candidate widths {list(self.widths)}")
        return self

    @property
    def size(self) -> int | None:
        """Bytes that all tensors of the checkpoint may take, None when `bits` is a mean."""
        found = SIZE.fullmatch(str(self.bits))
        return int(Fraction(found[1]) * (10**9 if found[2] == "GB" else 2**30)) if found else None

    @property
    def budget(self) -> Fraction:
        """Mean bits per weight as an exact fraction (2.75 is 11/4); a size has one when the model is known."""
        return Fraction(str(self.bits))


class Fixed(_Section):
    """Linears of one width, in bits per weight."""

    bits: int = Field(5, description="width of attention, shared experts, dense MLPs and the indexer's wq_b")

    @field_validator("bits")
    @classmethod
    def _legal(cls, bits: int) -> int:
        if bits not in INTEGER_WIDTHS:
            raise ValueError(f"bits must be 1 to 8, found {bits}")
        return bits


class Mtp(Fixed):
    """The multi-token-prediction layer: its experts' width and which trunk state feeds it."""

    bits: int = Field(8, description="width of the MTP layer's experts")
    hidden: Literal["pre_norm", "post_norm"] = Field(
        "post_norm", description="the trunk state the MTP layer reads: before or after the final norm"
    )


class Calibration(_Section):
    """Which text is read, how much of it, and what the encoder minimises on it."""

    set: str = Field("standard", description="a set of calibration/, or the path of one")
    domains: tuple[str, ...] = Field((), description="the set's domains to read; empty: all of them")
    window: int = Field(2048, ge=16, description="tokens per window")
    fit_windows: int = Field(224, ge=1, description="windows that shape the Hessians")
    simulation_windows: int = Field(
        0, ge=0, description="fit windows that predicted costs rest on if a quantized prefix encodes on all; 0: all"
    )
    selection_windows: int = Field(48, ge=1, description="held-out windows that the error is measured on")
    sensitivity_windows: int = Field(16, ge=1, description="selection windows that weigh the layers")
    hessian: Literal["weighted", "routed", "all"] = Field(
        "weighted", description="whose inputs an expert is fitted to: its own by router weight, its own, or all tokens"
    )
    states: Literal["float32", "bfloat16"] = Field(
        "float32", description="how activations are kept between layers; bfloat16 halves their bytes"
    )
    shrink: float = Field(0.25, ge=0, le=1, description="share of the layer's all-token Hessian mixed in")

    @model_validator(mode="after")
    def _sensitivity_within_selection(self) -> "Calibration":
        if self.sensitivity_windows > self.selection_windows:
            raise ValueError("sensitivity_windows cannot exceed selection_windows")
        return self


class Encoder(_Section):
    """The trellis encoder: who runs it and how hard it damps the Hessian."""

    backend: Literal["auto", "cpu", "cuda", "exllamav3"] = Field("auto", description="who runs the trellis search")
    sigma_reg: float = Field(0.025, gt=0, lt=1, description="damping, as a share of the Hessian's mean diagonal")
    low_memory: bool = Field(False, description="a GPU encodes and carries less at a time: under 24 GiB for GLM-5.3")
    refit_rounds: int = Field(1, ge=0, le=8, description="times the scales are fitted again after the search")
    sweeps: int = Field(0, ge=0, le=4, description="times all tiles are searched again, each given the others' errors")
    scales: Literal["rms", "tuned"] = Field(
        "rms", description="how far rows and columns are evened out first: fully, or as is best for the proxy error"
    )
    metric: Literal["scaled", "signs"] = Field(
        "scaled", description="whether the rounding's Hessian knows the row scales, or only the signs"
    )
    compensate: bool = Field(
        True, description="fit an expert's down projection to what its encoded gate and up give, before it is encoded"
    )
    prefix: Literal["source", "quantized"] = Field(
        "quantized", description="whose inputs linears are fitted to at last: the source's, or what encoded layers give"
    )

    @model_validator(mode="after")
    def _a_quantized_prefix_compensates(self) -> "Encoder":
        if self.prefix == "quantized" and not self.compensate:
            raise ValueError('compensate = false goes with prefix = "source" only: "quantized" corrects all linears')
        return self


class Output(_Section):
    """The finished checkpoint: how many safetensors files, and which engines it is laid out for."""

    shards: int = Field(81, ge=1, le=9999, description="safetensors files, at most one per layer and two")
    profile: Literal["per-expert", "uniform-layer", "bf16-rest"] = Field(
        "per-expert", description="a width per expert; one per layer; or a width per expert and the rest as BF16"
    )


class Panel(_Section):
    """The held-out text that judges the result; never calibrated on."""

    set: str = Field("standard-panel", description="a set of calibration/, or the path of one")
    window: int = Field(2048, ge=16, description="tokens per window")
    windows: int = Field(32, ge=1, description="windows in all, divided by the domains' shares")
    random_mixes: int = Field(5, ge=1, le=100, description="seeds of the random baseline, at most 100")


class Recipe(_Section):
    """Everything that shapes the output, frozen; see recipes/*.toml for annotated examples."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="goes into every report")
    seed: int = Field(35, ge=0, description="of signs, windows and baselines")
    source: Origin = Origin()
    experts: Experts = Experts()
    dense: Fixed = Fixed()
    mtp: Mtp = Mtp()
    calibration: Calibration = Calibration()
    encoder: Encoder = Encoder()
    output: Output = Output()
    panel: Panel = Panel()

    @model_validator(mode="after")
    def _one_width_needs_the_whole_model(self) -> "Recipe":
        if self.output.profile == "uniform-layer" and self.experts.scope == "layer":
            raise ValueError('output.profile "uniform-layer" mixes whole layers: it needs experts.scope = "model"')
        return self

    def with_fp8(self) -> "Recipe":
        """The same recipe for a source with FP8 weights."""
        return self.model_copy(update={"source": Origin(fp8=True)})

    @property
    def dense_bits(self) -> int:
        """Bits per weight of the dense linears in the output: 16 where they stay BF16."""
        return PLAIN_BITS if self.output.profile == "bf16-rest" else self.dense.bits

    def guarded(self) -> dict[str, object]:
        """What a resume must find unchanged: all of it but the panel, which judges and does not shape."""
        return self.model_dump(mode="json", exclude={"panel"})

    def published(self) -> "Recipe":
        """What a checkpoint says of it: a set that is named by an absolute path goes by its file's name, since the
        path tells of this machine, and nothing that does is published."""
        return self.model_copy(update={key: part.model_copy(update={"set": set_name(part.set)})
                                       for key, part in (("calibration", self.calibration), ("panel", self.panel))})

    def digest(self) -> str:
        """SHA-256 of the recipe's canonical JSON."""
        return recipe_digest(self.model_dump(mode="json"))


def recipe_digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe's values as canonical JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def set_name(name: str) -> str:
    """A set of text as a checkpoint names it."""
    return Path(name).name if Path(name).is_absolute() else name


def resource_dir(installed: str, in_repository: str) -> Path:
    """A data directory that a wheel carries under keys35/ and a clone keeps at its top level."""
    packaged = Path(str(files("keys35"))) / installed
    return packaged if packaged.is_dir() else Path(str(files("keys35"))).parent / in_repository


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(resource_dir("recipes", "recipes").glob("*.toml"))}


def find_recipe(name: str | Path) -> Path:
    """A path as given, or a shipped recipe by its bare name; raises RecipeError listing what ships."""
    path = Path(name)
    if path.is_file():
        return path
    shipped, asked = shipped_recipes(), path.name.removesuffix(".toml")
    if asked in shipped and len(path.parts) == 1:
        return shipped[asked]
    raise RecipeError(f"no recipe at '{name}'. Give a TOML file or one of the shipped names: {', '.join(shipped)}")


def load_recipe(name: str | Path) -> Recipe:
    """Read and validate a recipe; raises RecipeError naming each bad key, its value and what is legal."""
    path = find_recipe(name)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin with a byte-order mark
    except ValueError as error:  # of bytes that are no text, and of integers beyond all limits, too
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    if endless := [key for key, value in dotted(raw) if isinstance(value, int) and abs(value) >= 1 << 63]:
        raise RecipeError(f"{path}: {', '.join(endless)} is an integer of more than 64 bits, which TOML does not have")
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'recipe'}: {_plain(e)}" for e in error.errors()]
        raise RecipeError(f"{path} has {len(lines)} problem(s):\n" + "\n".join(lines)) from None


def dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested table's values by their dotted keys."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def stored_recipe(value: object, refusal: type[Keys35Error], where: Path) -> Recipe:
    """A recipe as a job or a checkpoint keeps it; raises `refusal` for one that another version of keys35 wrote."""
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, e["loc"])) or "the whole" for e in error.errors())
        raise refusal(f"{where} keeps a recipe that keys35 {__version__} cannot read ({keys}): use the version that "
                      "wrote it") from None


def _plain(error: dict) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key; remove it or check its spelling"
    return f"{error['msg'].removeprefix('Value error, ')} (found {error['input']!r})"
