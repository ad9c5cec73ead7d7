"""Profiles: which tensors a checkpoint encodes, for which engines, and what each choice costs in bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import get_args

from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, TensorRule
from keys35.recipe import Output, Recipe
from keys35.stages.sizes import class_sizes

PROFILES: tuple[str, ...] = get_args(Output.model_fields["profile"].annotation)


@dataclass(frozen=True)
class ProfileCost:
    """Tensor bytes of the output, and of one rank, under a profile at some mean width of the routed experts."""

    name: str
    mean_bits: Fraction
    output_bytes: int
    rank_bytes: int


def profile_rules(rules: Mapping[str, TensorRule], profile: str) -> dict[str, TensorRule]:
    """The table of names under a profile: with bf16-rest every dense linear is carried as the source has it."""
    if profile != "bf16-rest":
        return dict(rules)
    return {
        name: replace(rule, role=Role.CARRIED) if rule.role is Role.DENSE else rule for name, rule in rules.items()
    }


FUSED = {"q_a_proj": "fused_qkv_a_proj", "gate_proj": "gate_up_proj"}  # what vLLM joins, by its first member


def one_width_keys(rules: Iterable[TensorRule], expert_bits: Mapping[str, list[int]], dense_bits: int) -> dict:
    """What vllm-exl3 reads instead of trellis shapes: a width per layer, and which dense linears are encoded.

    Without `layer_bits` it takes int(bits), 2 for 2.75, for every layer; without `non_routed_exl3` it expects
    plain dense weights (reader-contract 1.6 and the plugin's own description of its config).
    """
    leaves = {rule.projection for rule in rules if rule.role is Role.DENSE}
    modules = sorted(leaves | {FUSED[leaf] for leaf in leaves & FUSED.keys()})
    return {
        "layer_bits": {layer: bits[0] for layer, bits in expert_bits.items()},
        "non_routed_exl3": {"codebook": "mul1", "bits": dense_bits, "modules": modules},
    }


def mixed_units(config: GlmConfig, recipe: Recipe) -> tuple[int, str]:
    """How many things of one width the budget is a mean over, and what they are called."""
    layers = len(config.moe_layers)
    if recipe.output.profile == "uniform-layer":
        return layers, "layers of one width"
    return (layers if recipe.experts.scope == "model" else 1) * config.n_routed_experts, "experts"


def profile_costs(
    census: Mapping[str, TensorRule], config: GlmConfig, recipe: Recipe, nbytes: dict[str, int], tp: int
) -> tuple[ProfileCost, ...]:
    """Every profile with this recipe's widths; a mean that whole layers cannot have is lowered to one they can."""
    costs = []
    for name in PROFILES:
        mean = recipe.experts.budget
        if name == "uniform-layer":
            mean = Fraction(int(mean * len(config.moe_layers)), len(config.moe_layers))
        experts = recipe.experts.model_copy(update={"bits": str(mean)})
        other = recipe.model_copy(update={"experts": experts})
        sizes = class_sizes(profile_rules(census, name).values(), other, nbytes, tp)
        total = (sum(getattr(size, key) for size in sizes) for key in ("output_bytes", "rank_bytes"))
        costs.append(ProfileCost(name, mean, *total))
    return tuple(costs)
