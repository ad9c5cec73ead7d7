"""A MoE layer of GLM-5.3 for 2,048 tokens on one GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exl3.packed import PackedLinears
from ..glm import experts as layer_experts
from ..glm.experts import RoutedExperts
from .synthetic import INNER, TOKENS, TOP, WIDTHS, D, linear, one_token, torch_decode
from .timing import attempt, milliseconds


def measure_moe(routed: RoutedExperts) -> dict[str, Any]:
    """A MoE layer for 2,048 tokens: router, 256 experts with 8 a token, shared expert of 5 bits."""
    generator = torch.Generator("cuda").manual_seed(1)
    rows = torch.randn(TOKENS, D, device="cuda", generator=generator).bfloat16()
    gate = torch.randn(len(WIDTHS), D, device="cuda", generator=generator)
    shared = PackedLinears(
        [linear(D, INNER, 5, generator), linear(D, INNER, 5, generator), linear(INNER, D, 5, generator)]
    )
    matrices = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shared.shapes]

    def whole() -> Tensor:
        ids, weights = choose(gate, rows)
        shared.reconstruct_into(range(3), matrices)
        always = (F.silu(rows @ matrices[0]) * (rows @ matrices[1])) @ matrices[2]
        return routed(rows, ids, weights)[0] + always.float()

    result: dict[str, Any] = {"tokens": TOKENS}
    grouped = layer_experts._has_grouped
    runs = {
        "grouped": (grouped, 5 << 30),
        "one_by_one": (lambda rows: False, 5 << 30),
        "grouped_all_at_once": (grouped, 40 << 30),
        "grouped_2_gib": (grouped, 2 << 30),
    }
    for name, (kernel, group) in runs.items():
        layer_experts._has_grouped, layer_experts.GROUP_BYTES = kernel, group
        result[f"{name}_ms"] = attempt(lambda: milliseconds(whole, 5))
    layer_experts._has_grouped, layer_experts.GROUP_BYTES = grouped, 2 << 30
    result["error"] = moe_error(routed, rows, gate)
    result["plain_torch_ms_of_8_experts"] = plain_moe(routed, rows, gate, 8)
    return result


def choose(gate: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.linear(rows.float(), gate * D**-0.5).sigmoid()
    chosen, ids = scores.topk(TOP, -1)
    return ids, chosen / chosen.sum(-1, keepdim=True) * 2.5


def moe_error(routed: RoutedExperts, rows: Tensor, gate: Tensor) -> float:
    """Relative error of a few tokens against float32 products of decoded weights."""
    ids, weights = choose(gate, rows)
    found, few = routed(rows, ids, weights)[0], range(0, TOKENS, TOKENS // 4)
    wanted = torch.stack([one_token(routed, rows[t].float(), ids[t].tolist(), weights[t]) for t in few])
    return float((found[list(few)] - wanted).norm() / wanted.norm())


def plain_moe(routed: RoutedExperts, rows: Tensor, gate: Tensor, count: int) -> float:
    """Milliseconds of plain torch for the first `count` experts: decode, gather, three products, scatter."""
    ids, weights = choose(gate, rows)

    def run() -> Tensor:
        total = torch.zeros(rows.shape, device="cuda")
        for expert in range(count):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            matrices = [torch_decode(*routed.linears.parts[3 * expert + part]) for part in range(3)]
            x = rows[token]
            output = (F.silu(x @ matrices[0]) * (x @ matrices[1])) @ matrices[2]
            total[token] += output.float() * weights[token, slot, None]
        return total

    return milliseconds(run, 3)
