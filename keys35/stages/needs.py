"""What a job needs of disk and memory, in bytes: asked by `plan` for all of it, by each stage for what is left."""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from keys35.calibration.statistics import SHARED_INPUT
from keys35.glm.attention import QUERY_ROWS
from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, TensorRule
from keys35.recipe import Recipe
from keys35.stages.job import GPU_AT_ONCE_TOKENS, LOW_MEMORY_AT_ONCE_TOKENS, LOW_MEMORY_STACK, STACK
from keys35.stages.prefix_cost import prefix_device_bytes
from keys35.stages.sizes import exl3_bytes
from keys35.stages.states import WINDOWS_AT_ONCE_TOKENS

FLOAT, BF16, INDEX = 4, 2, 4
SCRATCH = 4_429_185_024  # of the tile search on 132 multiprocessors, at 4 bits, where it is largest
ENCODED_TWICE = "mlp.shared_experts.down_proj.weight"  # behind a quantized prefix, the last time behind the experts
WEIGHED = 16  # simulated experts of a layer that are enough to weigh it by
ROWS_ON_DEVICE = 4 << 30  # beside what encoding takes: 26 GiB together for GLM-5.3
BESIDE_ROWS = 48 << 30  # what a GPU has beyond this is for rows, too: a driver's pass and an encoder take half each


def tokens(recipe: Recipe) -> int:
    """Calibration tokens of both splits."""
    return (recipe.calibration.fit_windows + recipe.calibration.selection_windows) * recipe.calibration.window


def _value(recipe: Recipe) -> int:
    return FLOAT if recipe.calibration.states == "float32" else BF16


def states_bytes(config: GlmConfig, recipe: Recipe) -> int:
    """Hidden states of all windows between two layers, and the sparse selections that layers share, as bits."""
    return tokens(recipe) * (config.hidden_size * _value(recipe) + recipe.calibration.window // 8)


def rows_windows(recipe: Recipe) -> int:
    """Fit windows that a layer's experts are measured on; behind a quantized prefix they are encoded on other rows."""
    again, choice = recipe.experts.measure == "predicted" and recipe.encoder.prefix == "quantized", recipe.calibration
    return min(again and choice.simulation_windows or choice.fit_windows, choice.fit_windows)


def rows_bytes(config: GlmConfig, recipe: Recipe) -> int:
    """Inputs and routing of one layer's experts."""
    count = (rows_windows(recipe) + recipe.calibration.selection_windows) * recipe.calibration.window
    return count * (config.hidden_size * _value(recipe) + config.num_experts_per_tok * (FLOAT + INDEX))


def prefix_bytes(config: GlmConfig, recipe: Recipe) -> tuple[int, int]:
    """States of the fit windows with a quantized prefix, behind two layers' attention in both streams; a layer's rows.

    The layer before has its states on disk until those of the next one are there.
    """
    fit = recipe.calibration.fit_windows * recipe.calibration.window
    value, routing = config.hidden_size * _value(recipe), config.num_experts_per_tok * (FLOAT + INDEX)
    rows = fit * (3 * value + routing + 1) + FLOAT * config.hidden_size**2
    return 2 * 2 * fit * (value + recipe.calibration.window // 8), rows


def captured_hessians(recipe: Recipe) -> tuple[str, ...] | None:
    """Which of a layer's Hessians the calibration pass keeps: a quantized prefix makes its own; None: all."""
    return (SHARED_INPUT,) if recipe.encoder.prefix == "quantized" else None


def hessian_bytes(rules: Iterable[TensorRule], recipe: Recipe) -> int:
    """One float32 matrix per distinct input of dense linears, which are captured whether or not they are encoded."""
    wanted = captured_hessians(recipe)
    dense = [rule for rule in rules if rule.projection and rule.expert is None
             and (wanted is None or rule.module.endswith(wanted))]
    inputs = {(rule.layer, rule.in_features, rule.module.rsplit(".", 1)[0]) for rule in dense}
    return FLOAT * sum(width * width for _, width, _ in inputs)


def encoded_bytes(rules: Iterable[TensorRule], role: Role, widths: Sequence[int | Fraction]) -> int:
    """Encodings of all linears of a role, one file per width."""
    return int(sum(exl3_bytes(rule, bits) for rule in rules if rule.role is role for bits in widths))


def sample_step(config: GlmConfig, recipe: Recipe) -> int:
    """One routed expert in so many is encoded at all widths: every one, or of predicted ones a sample, never none."""
    return min(recipe.experts.sample, config.n_routed_experts) if recipe.experts.measure == "predicted" else 1


def simulated_bytes(config: GlmConfig, experts: int, recipe: Recipe) -> int:
    """What is kept of so many simulated experts of a layer, to weigh it by; nothing unless they are predicted."""
    kept = min(experts, -(-experts * WEIGHED // config.n_routed_experts))
    one = 3 * config.hidden_size * config.moe_intermediate_size * BF16
    return kept * one if recipe.experts.measure == "predicted" else 0


def work_parts(rules: Sequence[TensorRule], config: GlmConfig, recipe: Recipe, keep: str) -> dict[str, int]:
    """What the work directory holds at its fullest, by kind."""
    widths, layers = recipe.experts.widths, len(config.moe_layers)
    final = encoded_bytes(rules, Role.EXPERT, [recipe.experts.budget])
    candidates = encoded_bytes(rules, Role.EXPERT, widths)
    if recipe.experts.measure == "predicted":  # every expert as it is chosen, a sample as it was measured
        candidates = final + candidates // sample_step(config, recipe)
    elif keep == "errors":  # the middle width, which weighs layers, and at most every expert once more as it is chosen
        candidates = encoded_bytes(rules, Role.EXPERT, [widths[len(widths) // 2]]) + final
    states, rows = 2 * states_bytes(config, recipe), 2 * rows_bytes(config, recipe)
    dense = encoded_bytes(rules, Role.DENSE, [recipe.dense.bits])
    if recipe.encoder.prefix == "quantized":
        if keep == "all" and recipe.experts.measure == "encoded":
            candidates += final  # beside what was measured
        behind = prefix_bytes(config, recipe)
        states, rows = max(states, behind[0]), max(rows, behind[1])
        twice = [rule for rule in rules if rule.layer in config.moe_layers and rule.name.endswith(ENCODED_TWICE)]
        dense += encoded_bytes(twice, Role.DENSE, [recipe.dense.bits])
    return {
        "candidate encodings": candidates,
        "simulated experts": layers * simulated_bytes(config, config.n_routed_experts, recipe),
        "dense linears and MTP experts": dense + encoded_bytes(rules, Role.MTP_EXPERT, [recipe.mtp.bits]),
        "Hessians": hessian_bytes(rules, recipe),
        "states of two layers": states,
        "rows of two layers": rows,
    }


def host_bytes(largest: int, config: GlmConfig, recipe: Recipe) -> int:
    """Peak of the driver: a layer's states and its rows, the copies that weigh layers, or a quantized prefix's streams.

    `largest` is the largest source tensor, held twice, as is the largest Hessian.
    """
    passing = 2 * FLOAT * _widest(config) ** 2 + 2 * largest
    states = _value(recipe) * config.hidden_size * tokens(recipe)
    routing = tokens(recipe) * config.num_experts_per_tok * (FLOAT + 2 * INDEX)
    at_once = max(1, WINDOWS_AT_ONCE_TOKENS // recipe.calibration.window) * recipe.calibration.window
    copies = (len(config.moe_layers) + 2) * at_once * config.hidden_size * FLOAT
    behind = 0
    if recipe.encoder.prefix == "quantized":  # in one place, beside a layer's rows, while it is encoded
        of_two, rows = prefix_bytes(config, recipe)
        behind = of_two // 2 + rows
    return max(2 * states + routing, copies, behind) + passing


def _widest(config: GlmConfig) -> int:
    return max(config.num_attention_heads * config.v_head_dim, config.intermediate_size, config.hidden_size)


def device_bytes(config: GlmConfig, recipe: Recipe) -> int:
    """A layer as it is stored while states go through it, or a batch of experts while it is encoded; the larger.

    Measured for one layer of GLM-5.3: reports/benchmarks/real-layer-h200.json.
    """
    low = recipe.encoder.low_memory
    at_once = LOW_MEMORY_AT_ONCE_TOKENS if low else GPU_AT_ONCE_TOKENS
    scores = config.num_attention_heads * QUERY_ROWS * recipe.calibration.window
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    layer = config.n_routed_experts * expert * BF16
    passing = FLOAT * (2 * _widest(config) ** 2 + 4 * at_once * config.hidden_size + 6 * scores)
    if recipe.encoder.prefix == "quantized":  # linears are corrected, or one is encoded, while no expert is there
        corrected = prefix_device_bytes(config, _widest(config))
        passing = max(layer + passing, passing + corrected, passing + corrected // 2 + SCRATCH)
    else:
        passing += layer
    stack = LOW_MEMORY_STACK if low else STACK
    experts = min(recipe.experts.group, max(1, 3 * stack // (2 * expert)))
    hidden, inner = config.hidden_size**2, config.moe_intermediate_size**2
    rows = rows_bytes(config, recipe)
    encoding = experts * FLOAT * (expert * 5 + 4 * hidden + 2 * inner) + 14 * min(stack, experts * expert) + SCRATCH
    if recipe.encoder.sweeps:  # the metric of every matrix in the stack, and what its errors pull
        encoding += FLOAT * (2 * experts * hidden + 2 * min(stack, experts * expert))
    return max(passing, encoding + (rows if rows_stay(rows, recipe) else 0))


def largest_rows(config: GlmConfig, recipe: Recipe) -> int:
    """Of one layer: those that it is measured on, or those behind a quantized prefix; none where GPUs keep none."""
    if recipe.encoder.low_memory:
        return 0
    behind = prefix_bytes(config, recipe)[1] if recipe.encoder.prefix == "quantized" else 0
    return max(rows_bytes(config, recipe), behind)


def states_stay(config: GlmConfig, recipe: Recipe, memory: int) -> bool:
    """Whether a GPU of so much memory keeps the states that go through the layers, beside a layer's rows."""
    behind = prefix_bytes(config, recipe)[0] // 2 if recipe.encoder.prefix == "quantized" else 0
    kept = max(states_bytes(config, recipe), behind) + largest_rows(config, recipe)
    return kept <= memory - BESIDE_ROWS and not recipe.encoder.low_memory


def rows_stay(nbytes: int, recipe: Recipe, memory: int = 0) -> bool:
    """Whether so many bytes of a layer's rows are kept on a GPU of so much memory while its experts are encoded."""
    return nbytes <= max(ROWS_ON_DEVICE, memory - BESIDE_ROWS) and not recipe.encoder.low_memory
