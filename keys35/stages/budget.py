"""A budget in bytes: the mean width of the routed experts that a checkpoint's size leaves room for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from keys35.errors import BudgetError
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, TensorRule, census
from keys35.recipe import Recipe
from keys35.stages.feasible import has_mix
from keys35.stages.profile import mixed_units, profile_rules
from keys35.stages.sizes import exl3_bytes

DENSE_BITS, MTP_BITS = (4, 5, 6, 8), (3, 4, 8)  # what a plan looks at


@dataclass(frozen=True)
class Weighed:
    """What a checkpoint's tensor bytes depend on: bytes that no width changes, and weights that each width scales."""

    fixed: Fraction
    experts: int
    dense: int
    mtp: int

    @classmethod
    def of(cls, rules: Iterable[TensorRule], nbytes: Mapping[str, int]) -> "Weighed":
        """nbytes: each tensor's bytes in the source, which the carried ones keep."""
        fixed, weights = Fraction(0), dict.fromkeys(Role, 0)
        for rule in rules:
            fixed += nbytes[rule.source] if rule.role is Role.CARRIED else exl3_bytes(rule, Fraction(0))
            if rule.role is not Role.CARRIED:
                weights[rule.role] += rule.padded[0] * rule.padded[1]
        return cls(fixed, weights[Role.EXPERT], weights[Role.DENSE], weights[Role.MTP_EXPERT])

    def nbytes(self, mean: Fraction, dense: int, mtp: int) -> Fraction:
        """All tensors at these widths."""
        return self.fixed + (self.experts * mean + self.dense * dense + self.mtp * mtp) / 8

    def mean(self, nbytes: Fraction, dense: int, mtp: int) -> Fraction:
        """The experts' mean that makes all tensors so large, whether or not there is such a width."""
        return (nbytes - self.nbytes(Fraction(0), dense, mtp)) * 8 / self.experts


@dataclass(frozen=True)
class Trade:
    """Widths at which the checkpoint has the same size."""

    dense: int
    mtp: int
    mean: float


def within_size(recipe: Recipe, source: ShardedSource, config: GlmConfig) -> Recipe:
    """The recipe with the largest mean at which all tensors fit its size in bytes, and unchanged if it has none.

    The size counts tensors, as a plan does; headers and reports come on top. Raises BudgetError when even the least
    width is too large.
    """
    size = recipe.experts.size
    if size is None:
        return recipe
    (count, what), widths = mixed_units(config, recipe), recipe.experts.widths
    if not count:
        raise BudgetError("a size for experts.bits needs routed experts, and this model has none")
    weighed = Weighed.of(profile_rules(census(config), recipe.output.profile).values(), _sizes(source))
    widths_there = recipe.dense.bits, recipe.mtp.bits
    most = min(weighed.mean(Fraction(size), *widths_there), Fraction(widths[-1]))
    mean = Fraction(floor(most * count), count)
    while mean > widths[0] and not has_mix(widths, mean, count):  # of 2 and 4 bits, say, an odd sum
        mean -= Fraction(1, count)
    if mean < widths[0]:
        least = weighed.nbytes(Fraction(widths[0]), *widths_there)
        raise BudgetError(
            f"experts.bits = {recipe.experts.bits!r} leaves the {what} {float(mean):.3g} bits, the least width is "
            f"{widths[0]}, at which the tensors are {float(least) / 1e9:,.3f} GB: ask for more, or lower "
            "dense.bits or mtp.bits"
        )
    return recipe.model_copy(update={"experts": recipe.experts.model_copy(update={"bits": str(mean)})})


def trades(rules: Iterable[TensorRule], recipe: Recipe, nbytes: Mapping[str, int]) -> tuple[Trade, ...]:
    """What the experts' mean would be at other widths of dense linears and MTP experts, at the recipe's size."""
    weighed, experts = Weighed.of(rules, nbytes), recipe.experts
    if not weighed.experts:
        return ()
    size = weighed.nbytes(experts.budget, recipe.dense.bits, recipe.mtp.bits)
    found = [
        Trade(dense, mtp, float(weighed.mean(size, dense, mtp)))
        for dense in (DENSE_BITS if weighed.dense else [recipe.dense_bits])
        for mtp in (MTP_BITS if weighed.mtp else [recipe.mtp.bits])
    ]
    return tuple(trade for trade in found if experts.widths[0] <= trade.mean <= experts.widths[-1])


def _sizes(source: ShardedSource) -> dict[str, int]:
    return {name: tensor.entry.nbytes for name, tensor in source.tensors.items()}
