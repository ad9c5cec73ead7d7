"""What every stage needs: the source, its table of names, the recipe and the guarded work directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from keys35 import __version__
from keys35.calibration.text import TextSet, load_text_set
from keys35.errors import PlanError, ResumeError
from keys35.exl3.encode import EncodeOptions
from keys35.exl3.scale import FULL_POWERS, ScalePowers
from keys35.exl3.viterbi import backend_device
from keys35.files.atomic import write_json
from keys35.files.forms import read_formed
from keys35.files.ledger import BEGIN_AGAIN, MANIFEST, WHEREABOUTS, Workdir
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig, refuse_other_architectures
from keys35.glm.names import TensorRule, census, match_source
from keys35.glm.weights import WeightStore
from keys35.recipe import Recipe, stored_recipe
from keys35.report.machine import machine
from keys35.stages.budget import within_size
from keys35.stages.feasible import refuse_impossible, refuse_unfinishable
from keys35.stages.profile import profile_rules
from keys35.stages.states import WINDOWS_AT_ONCE_TOKENS

Keep = Literal["all", "errors"]
FORM = {"type": "object", "required": ["source", "recipe"], "properties": {
    "source": {"type": "string"}, "keep": {"type": "string"}, "folder": {"type": "string"}}}
GPU_AT_ONCE_TOKENS, LOW_MEMORY_AT_ONCE_TOKENS = 24576, 4096
STACK, LOW_MEMORY_STACK = 33 << 23, 1 << 27  # weights: gates and ups of 11 experts of GLM-5.3, and of 5


@dataclass(frozen=True)
class Job:
    """One source turned into one checkpoint by one recipe, in one work directory."""

    source: ShardedSource
    config: GlmConfig
    rules: dict[str, TensorRule]
    dropped: tuple[str, ...]
    recipe: Recipe
    text: TextSet
    work: Workdir
    keep: Keep = "all"
    """Which encodings `measure` leaves on disk: of all widths, or those that layer weights need, and only errors."""
    folder: Path = Path()
    """Where the job was begun: a set of calibration text that is named by a relative path lies there."""

    @property
    def experts(self) -> int:
        return self.config.n_routed_experts

    @property
    def encode_options(self) -> EncodeOptions:
        settings = self.recipe.encoder
        return EncodeOptions(
            backend=settings.backend,
            sigma_reg=settings.sigma_reg,
            refit_rounds=settings.refit_rounds,
            sweeps=settings.sweeps,
            stack_elements=LOW_MEMORY_STACK if settings.low_memory else STACK,
            powers=ScalePowers() if settings.scales == "tuned" else FULL_POWERS,
            scaled_metric=settings.metric == "scaled",
        )

    @property
    def tokens_at_once(self) -> int:
        """Tokens that go through a layer together; on a GPU more, because every expert's product is then larger."""
        if self.device.type == "cpu":
            return WINDOWS_AT_ONCE_TOKENS
        return LOW_MEMORY_AT_ONCE_TOKENS if self.recipe.encoder.low_memory else GPU_AT_ONCE_TOKENS

    @property
    def reads_ahead(self) -> bool:
        """Whether the system is asked to read what comes next into its page cache, for a GPU that would wait for it."""
        return self.device.type == "cuda" and not self.recipe.encoder.low_memory

    @property
    def device(self) -> torch.device:
        """Where forward passes, statistics and the encoder compute; what they leave behind is on the host."""
        return backend_device(self.recipe.encoder.backend)

    @property
    def states_dtype(self) -> torch.dtype:
        """What activations are kept in between layers."""
        return getattr(torch, self.recipe.calibration.states)

    @property
    def store(self) -> WeightStore:
        """The source's weights, as float32 on the job's device."""
        return WeightStore(self.source, self.config, device=self.device)

    def expert_groups(self) -> list[range]:
        """The experts of a layer in units of work."""
        size = self.recipe.experts.group
        return [range(first, min(first + size, self.experts)) for first in range(0, self.experts, size)]


def read_source(source: Path, recipe: Recipe) -> tuple[ShardedSource, GlmConfig, tuple[str, ...]]:
    """Open a source from headers alone and match it with its config; raises SourceError."""
    refuse_other_architectures(source)
    opened = ShardedSource.open(source, recipe.source.fp8)
    config = GlmConfig.from_dict(opened.config, mtp_hidden=recipe.mtp.hidden)
    found = {name: (t.entry.dtype, t.entry.shape) for name, t in opened.tensors.items()}
    return opened, config, match_source(config, found)


@contextmanager
def open_job(
    source: Path, recipe: Recipe, root: Path, keep: Keep = "all", folder: Path | None = None
) -> Iterator[Job]:
    """Start or resume a job; raises ResumeError if the directory belongs to another job or is in use.

    What source and recipe cannot have together is refused (PlanError, BudgetError) before the directory is theirs.
    """
    refuse_nesting(Path(source), None, Path(root))
    opened, config, dropped = read_source(source, recipe)
    recipe = within_size(recipe, opened, config)
    rules = profile_rules(census(config), recipe.output.profile)
    refuse_impossible(rules.values(), config, recipe)
    if not (Path(root) / MANIFEST).exists():
        refuse_unfinishable(opened)
    folder = (folder or Path()).absolute()
    text = load_text_set(recipe.calibration.set, folder).only(recipe.calibration.domains)
    work = Workdir.open(root, _guard(opened, recipe, text))
    with work.lock():
        whereabouts = {"source": str(Path(source).resolve()), "recipe": recipe.model_dump(mode="json"), "keep": keep,
                       "folder": str(folder), "layers": len(config.layers), "mtp_layers": list(config.mtp_layers),
                       "experts": len(config.moe_layers) * config.n_routed_experts,
                       "experts_a_layer": config.n_routed_experts}
        write_json(work.path(WHEREABOUTS), whereabouts)
        work.log("started", machine=machine())
        yield Job(opened, config, rules, dropped, recipe, text, work, keep, folder)


def refuse_nesting(source: Path, out: Path | None, work: Path) -> None:
    """Refuse (PlanError) folders inside one another: one's files would be carried or published with the other's."""
    places = {"source": source, "work directory": work} | ({"output": out} if out else {})
    for name, place in places.items():
        for other, root in places.items():
            if name != other and place.resolve().is_relative_to(root.resolve()):
                raise PlanError(f"the {name} {place} lies in the {other} {root}: choose a folder outside of it")


@contextmanager
def resume_job(root: Path) -> Iterator[Job]:
    """Reopen the job of a work directory by its path alone; raises ResumeError if there is none."""
    path = Path(root) / WHEREABOUTS
    if not path.is_file():
        raise ResumeError(f"{root} holds no keys35 job: start with `keys35 measure SOURCE --recipe R --work {root}`")
    facts = read_formed(path, FORM, remedy=BEGIN_AGAIN)
    recipe = stored_recipe(facts["recipe"], ResumeError, path)
    with open_job(Path(facts["source"]), recipe, root, facts.get("keep", "all"), _folder(facts)) as job:
        yield job


def attach_job(root: Path) -> Job:
    """The job that a driver holds open, for one of its workers: no lock is taken and no resume checked."""
    work = Workdir.open(root, None)
    facts = read_formed(work.path(WHEREABOUTS), FORM, remedy=BEGIN_AGAIN)
    recipe = stored_recipe(facts["recipe"], ResumeError, work.path(WHEREABOUTS))
    opened, config, dropped = read_source(Path(facts["source"]), recipe)
    rules = profile_rules(census(config), recipe.output.profile)
    folder = _folder(facts)
    text = load_text_set(recipe.calibration.set, folder).only(recipe.calibration.domains)
    return Job(opened, config, rules, dropped, recipe, text, work, facts.get("keep", "all"), folder)


def _folder(facts: dict[str, str]) -> Path:
    """Where a job was begun; older versions did not say."""
    return Path(facts.get("folder", "."))


def _guard(source: ShardedSource, recipe: Recipe, text: TextSet) -> dict[str, object]:
    return {
        "tool": __version__,
        "source": source.fingerprint(),
        "recipe": recipe.guarded(),
        "calibration_text": text.digest,
    }
