"""What a quantized prefix takes beside everything else: its passes, sums and solves in seconds, and its memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keys35.calibration.correction import RIDGES
from keys35.calibration.solve import PROBES
from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, TensorRule
from keys35.recipe import Recipe

HALVES, FLOAT_BYTES = 2, 4
STREAMS = 2  # the source's states and those of the encoded model
ATTENTION_PASSES = 4  # each up to the MLP: for three groups of attention's linears, and for what the MLP is given
JOINED = ("kv_a_proj_with_mqa", "wq_b", "up_proj")  # the second of two linears that have their input in common
WRITERS = ("o_proj", "down_proj")  # their output is added to the state, and makes up for what that lacks
SQUARES = 9  # float32 (in, in) on the device while a linear is corrected: its sums, their total, and a system's parts


@dataclass(frozen=True)
class PrefixSeconds:
    """alone: what one device does, layer after layer; shared: what workers divide, a layer's experts at a time."""

    alone: float = 0.0
    shared: float = 0.0


def prefix_seconds(
    measured: Mapping[str, Any], solves: Mapping[str, Any] | None, config: GlmConfig, rules: Iterable[TensorRule],
    recipe: Recipe,
) -> PrefixSeconds:
    """From a measured layer and measured sums and solves (reports/benchmarks), nothing with the source's prefix.

    Linears are not encoded here: an expert's last encoding is among `encoder_passes`.
    """
    if recipe.encoder.prefix != "quantized":
        return PrefixSeconds()
    assert solves is not None, "the quantized prefix has no measured solves"
    rules = list(rules)
    fit, spent = recipe.calibration.fit_windows * recipe.calibration.window, measured["seconds"]
    more, every = fit / measured["tokens"]["fit"], fit / sum(measured["tokens"].values())
    passes = STREAMS * (ATTENTION_PASSES * attention_share(config, rules) + 1)
    layers = len(config.layers)
    # The measured layer was read twice, for its pass and to encode its experts; this takes two passes more, and those.
    alone = layers * (spent["forward"] * every * passes + spent["reading"])
    shared = len(config.moe_layers) * (spent["Hessians"] * more + spent["reading"] / 2)
    of_dense, of_experts = correction_flops(config, rules, fit)
    rate = solves["flops_per_second"]
    return PrefixSeconds(alone + of_dense / rate, shared + of_experts / rate)


def attention_share(config: GlmConfig, rules: Iterable[TensorRule]) -> float:
    """Attention's part of a forward pass, by the weights that a token meets in an MoE layer."""
    layer = config.moe_layers[0]
    mine = [rule for rule in rules if rule.layer == layer and len(rule.shape) == 2]
    attention = sum(rule.numel for rule in mine if ".self_attn." in rule.name)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    return attention / (attention + (config.num_experts_per_tok + config.n_shared_experts) * expert)


def correction_flops(config: GlmConfig, rules: Iterable[TensorRule], fit: int) -> tuple[float, float]:
    """Floating-point operations of all corrections' sums and solves: of dense linears, and of experts."""
    routed = fit * config.num_experts_per_tok / config.n_routed_experts
    dense, experts = 0.0, 0.0
    for rule in (rule for rule in rules if rule.quantized):
        n, m, second = rule.in_features, rule.out_features, rule.projection in JOINED
        rows = fit if rule.role is Role.DENSE else routed
        sums = 0 if second else sum_flops(n, rows, m if rule.projection in WRITERS else 0)
        if rule.role is Role.DENSE:
            dense += sums + solve_flops(n, m)
        else:  # an expert's gate and up are solved as one
            experts += sums + solve_flops(n, m, systems=0 if second else 1)
    return dense, experts


def sum_flops(inputs: int, rows: float, missing: int = 0) -> float:
    """q^T q, q^T (x - q) and q^T r over so many rows; missing: how many columns r has."""
    return 2 * rows * inputs * (2 * inputs + missing)


def solve_flops(inputs: int, outputs: int, systems: int = 1) -> float:
    """Each ridge fitted to each half's probes and judged on the other, one fit to all; see `PairedInputs.corrected`.

    systems: 0 where the factorisations are another linear's.
    """
    judged = HALVES * len(RIDGES)
    of_probes, of_all = (2 * inputs**2 * columns for columns in (min(PROBES, outputs), outputs))
    return systems * (judged + 1) * inputs**3 / 3 + (2 * judged + HALVES) * of_probes + 2 * of_all


def prefix_device_bytes(config: GlmConfig, widest: int) -> int:
    """While the linear with the most inputs is corrected: squares of its inputs, beside the matrix and its matches."""
    return FLOAT_BYTES * (SQUARES * widest**2 + 6 * widest * config.hidden_size)
