"""What a model and a recipe cannot have together: asked by `plan`, and whenever a job is opened, not at hour twenty."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import inf

from keys35.allocation import require_exact
from keys35.errors import BudgetError, PlanError, SourceError
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import BLOCK, Role, TensorRule, split_axis, unit_count
from keys35.recipe import Recipe
from keys35.stages.contract import TP, is_off_cut, unread_keys
from keys35.stages.profile import mixed_units


def refuse_impossible(rules: Iterable[TensorRule], config: GlmConfig, recipe: Recipe) -> None:
    """Refuse too many shards or experts of odd shapes (PlanError), and a mean that no mix has (BudgetError)."""
    if recipe.output.shards > unit_count(config):
        raise PlanError(
            f"{recipe.output.shards} shards asked, this model has {unit_count(config)} units "
            "(embedding, one per layer, norm with head): lower output.shards"
        )
    if not config.moe_layers:
        raise PlanError("this model has no layer with routed experts: there is nothing to choose widths for")
    require_mix(recipe.experts.widths, recipe.experts.budget, *mixed_units(config, recipe))
    experts = (r for r in rules if r.role in (Role.EXPERT, Role.MTP_EXPERT))
    odd = [r.name for r in experts if r.shape[0] % BLOCK or r.shape[1] % BLOCK]
    if odd:
        raise PlanError(f"routed experts are not multiples of {BLOCK}, engines cannot cut them: {odd[:3]}")


def refuse_unfinishable(source: ShardedSource) -> None:
    """Refuse (SourceError) what goes into the checkpoint and would be refused there: a config.json, or a link."""
    config = source.config
    bad = [f"{key} is {config.get(key)!r}" for key in unread_keys(config)]
    bad += ["tied_word_embeddings is no key of it (tie_word_embeddings)"] if "tied_word_embeddings" in config else []
    if bad:
        raise SourceError(f"{source.root / 'config.json'} goes into the checkpoint, where engines could not read it: "
                          f"{'; '.join(bad)}. Mend it before the job begins, which knows the source by it")
    source.side_files()


def refuse_uncut(rules: Iterable[TensorRule]) -> None:
    """Refuse (PlanError) a model that the contract's ranks cannot share, which `check` would do in the end."""
    for rule in rules:
        axis = split_axis(rule, "trellis" if rule.quantized else "weight")
        size = None if axis is None else (rule.padded if rule.quantized else rule.shape)[axis]
        if size is not None and is_off_cut(rule, size):
            raise PlanError(f"{rule.name} has {size} features or rows, which {TP} ranks cannot share in whole blocks, "
                            "as `check` asks for; for other engines go stage by stage (`keys35 measure` and so on), "
                            "with `keys35 check --engine` at the end")


def require_mix(widths: Sequence[float], mean: Fraction, count: int, what: str) -> None:
    """Refuse (BudgetError) a mean that `count` of these widths cannot have: of 2 and 4 bits, say, an odd sum."""
    require_exact(mean, count, what)
    if not has_mix(widths, mean, count):
        raise BudgetError(f"no mix of the widths {list(widths)} over {count} {what} has a mean of exactly {mean} bits: "
                          "change experts.bits, or add a width between them")


def has_mix(widths: Sequence[float], mean: Fraction, count: int) -> bool:
    """Whether `count` of these widths can have a mean that is a whole number of bits in all."""
    extras = [int(2 * (width - widths[0])) for width in widths[1:]]  # in half bits
    spare = int(2 * (mean - Fraction(widths[0])) * count)
    least = [0, *[inf] * spare]  # how many must be wider than the narrowest to have so much more together
    for total in range(1, spare + 1):
        least[total] = 1 + min((least[total - extra] for extra in extras if extra <= total), default=inf)
    return least[spare] <= count
