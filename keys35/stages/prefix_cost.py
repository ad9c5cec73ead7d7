"""What a quantized prefix takes beside everything else: its passes, sums and solves in seconds, and its memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keys35.glm.config import GlmConfig
from keys35.recipe import Recipe

FLOAT_BYTES = 4
SQUARES = 8  # float32 (in, in) on the device while a linear is corrected: its sums, their total, and a system's parts


@dataclass(frozen=True)
class PrefixSeconds:
    """alone: what one device does, layer after layer; shared: what workers divide, a layer's experts at a time.

    waiting: for rows to be on disk before another process can begin, which one that has them in memory does not.
    """

    alone: float = 0.0
    shared: float = 0.0
    waiting: float = 0.0


def prefix_seconds(measured: Mapping[str, Any], config: GlmConfig, recipe: Recipe) -> PrefixSeconds:
    """From a layer behind a quantized prefix, as reports/benchmarks/prefix-layer-h200.json has it.

    Linears are not encoded here: an expert's last encoding is among `encoder_passes`. Its sums and solves are taken to
    grow with the text, as only the sums do.
    """
    fit, parts = recipe.calibration.fit_windows * recipe.calibration.window, measured["behind_prefix"]
    more, dense, experts = fit / measured["tokens"]["fit"], parts["dense"], parts["experts"]
    corrected = more * (dense["forward"] + dense["writing"]) + dense["Hessians"]
    again = measured["measuring"]["reading"]  # the source's stream passes the layer, which is read once more
    onward = more * (measured["onward_seconds"] - again) + again
    of_experts = more * experts["Hessians"] + experts["reading"] + experts["writing"]
    moe = sum(config.is_moe(layer) for layer in config.layers)  # the MTP layer is one
    waiting = moe * more * (dense["saving"] - dense["writing"])
    return PrefixSeconds(len(config.layers) * (corrected + onward), moe * of_experts, waiting)


def prefix_device_bytes(config: GlmConfig, widest: int) -> int:
    """While the linear with the most inputs is corrected: squares of its inputs, beside the matrix and its matches."""
    return FLOAT_BYTES * (SQUARES * widest**2 + 6 * widest * config.hidden_size)
