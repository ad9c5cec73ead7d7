"""The packed kernels at GLM-5.3's shapes on one GPU: copy, reconstruction, products; settings side by side."""

from typing import Any

import torch
import torch.nn.functional as F

from ..exl3.gpu import packed as kernels
from ..exl3.gpu.packed import Product, Reconstruction, experts, matvec, reconstruct_into
from ..exl3.linear import decode_weight
from ..exl3.packed import PackedLinears
from ..glm.experts import RoutedExperts
from .synthetic import INNER, TOP, D, layer, linear, one_token, torch_decode
from .timing import attempt, graph_ms, milliseconds

SETS = 16  # different groups of eight experts, so that none comes from the cache

RECONSTRUCTIONS = [Reconstruction(*how) for how in [
    (False, 8, 4, 0), (False, 8, 5, 0), (False, 16, 2, 0), (False, 16, 3, 0), (False, 8, 4, 600),
    (True, 8, 4, 0), (True, 8, 3, 0),
]]  # fmt: skip
PRODUCTS = [Product(*how) for how in [
    (2, 24, 1, 6144, True, 2), (2, 24, 1, 6144, False, 2), (1, 24, 1, 6144, True, 2), (2, 24, 1, 6144, True, 1),
    (2, 20, 1, 8192, True, 2), (2, 16, 1, 9216, True, 2), (2, 12, 2, 6144, True, 2), (2, 8, 3, 6144, True, 2),
]]  # fmt: skip


def measure_copy() -> float:
    """GB/s of a copy within the GPU's memory, bytes read and written."""
    a = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    b = torch.empty_like(a)
    return 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e6


def measure_reconstruct(routed: RoutedExperts, copy: float) -> dict[str, Any]:
    """All 768 matrices of a layer to bfloat16 in one launch, by kernel variant."""
    linears = routed.linears
    outs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in linears.shapes]
    moved, which = linears.nbytes + sum(out.nbytes for out in outs), range(len(linears))
    result: dict[str, Any] = {"matrices": len(linears), "bytes": moved, "variants": {}}
    wanted = [decode_weight(*linears.parts[i]).float() for i in (0, 5, 400)]
    for how in RECONSTRUCTIONS:
        for out in outs:
            out.fill_(torch.nan)
        ms = attempt(lambda how=how: milliseconds(lambda: reconstruct_into(linears.table, which, outs, "mul1", how), 5))
        if isinstance(ms, str):
            result["variants"][str(how)] = ms
            continue
        errors = [float((outs[i].float() - w).norm() / w.norm()) for i, w in zip((0, 5, 400), wanted, strict=True)]
        result["variants"][str(how)] = {
            "ms": ms, "gbs": moved / ms / 1e6, "of_copy": moved / ms / 1e6 / copy, "error": max(errors)
        }  # fmt: skip
    result["best"] = best_of(result["variants"], "ms")
    result["rounding_error"] = max(float((w.bfloat16().float() - w).norm() / w.norm()) for w in wanted)
    few = [linears.parts[i] for i in range(6)]
    single = sum(t.nbytes for parts in few for t in parts) + sum(outs[i].nbytes for i in range(6))
    ms = milliseconds(lambda: [torch_decode(*parts) for parts in few], 3)
    result["plain_torch_gbs"] = single / ms / 1e6
    ms = milliseconds(lambda: [decode_weight(*parts, dtype=torch.bfloat16) for parts in few], 3)
    result["one_by_one_exact_gbs"] = single / ms / 1e6
    return result


def measure_peer(routed: RoutedExperts, copy: float) -> dict[str, Any]:
    """exllamav3's batched reconstruction of the same layer to half: a launch for each width and shape."""
    from exllamav3.ext import exllamav3_ext as peer

    linears, groups = routed.linears, {}
    for i, (trellis, _, _) in enumerate(linears.parts):
        groups.setdefault((trellis.shape[2] // 16, linears.shapes[i]), []).append(i)
    jobs = []
    for (bits, shape), members in groups.items():
        out = torch.empty(len(members), *shape, dtype=torch.float16, device="cuda")
        pointers = [
            torch.tensor([linears.parts[i][part].data_ptr() for i in members], device="cuda") for part in range(3)
        ]
        jobs.append((out, *pointers, float(bits), False, True))
    ms = milliseconds(lambda: [peer.reconstruct_had_batch(*job) for job in jobs], 5)
    gbs = (linears.nbytes + sum(job[0].nbytes for job in jobs)) / ms / 1e6
    first = next(iter(groups.values()))[0]
    wanted = decode_weight(*linears.parts[first])
    return {
        "ms": ms,
        "gbs": gbs,
        "of_copy": gbs / copy,
        "error": float((jobs[0][0][0].float() - wanted).norm() / wanted.norm()),
    }


def measure_decode(copy: float) -> dict[str, Any]:
    """One token through eight experts (2, 2, 2, 3, 3, 3, 3, 4 bits), a different eight every time."""
    routed = layer([2, 2, 2, 3, 3, 3, 3, 4] * SETS, seed=2)
    linears = routed.linears
    packed = linears.nbytes / SETS
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(1, D, device="cuda", generator=generator)
    weights = torch.rand(1, TOP, device="cuda", generator=generator)
    chosen = torch.arange(SETS * TOP, dtype=torch.int32, device="cuda").view(SETS, 1, TOP)
    wanted = one_token(routed, x[0], range(TOP), weights[0])
    result: dict[str, Any] = {"packed_bytes": packed, "variants": {}}

    def run(how: Product) -> None:
        for one in chosen:
            experts(linears.table, one, weights, x, INNER, "mul1", how)

    for how in PRODUCTS:
        result["variants"][str(how)] = attempt(
            lambda how=how: decode_variant(how, run, linears, chosen, weights, x, wanted, packed, copy)
        )
    result["best"] = best_of(result["variants"], "us")
    best = next(how for how in PRODUCTS if str(how) == result["best"])
    kernels.PRODUCT = best
    result["without_graph_us"] = attempt(lambda: milliseconds(lambda: run(best)) / SETS * 1e3)

    def plain() -> None:
        matrices = [torch_decode(*linears.parts[i]).float() for i in range(3 * TOP)]
        for e in range(TOP):
            (F.silu(x @ matrices[3 * e]) * (x @ matrices[3 * e + 1])) @ matrices[3 * e + 2]

    result["plain_torch_us"] = milliseconds(plain, 3) * 1e3
    return result


def decode_variant(how, run, linears, chosen, weights, x, wanted, packed, copy) -> dict[str, float]:
    found = [experts(linears.table, chosen[0], weights, x, INNER, "mul1", how)[0] for _ in range(2)]
    us = graph_ms(lambda: run(how)) / SETS * 1e3
    gbs = packed / us / 1e3
    return {"us": us, "gbs": gbs, "of_copy": gbs / copy, "repeats": bool(torch.equal(*found)),
            "error": float((found[0] - wanted).norm() / wanted.norm())}  # fmt: skip


def measure_linears() -> dict[str, Any]:
    """Single vectors through single matrices of the dense part, GB/s of packed bytes."""
    result, generator = {}, torch.Generator("cuda").manual_seed(4)
    for name, k, n, bits in [("q_b", 2048, 16384, 5), ("o_proj", 16384, 6144, 5), ("mtp expert", 6144, 2048, 8)]:
        linears = PackedLinears([linear(k, n, bits, generator) for _ in range(12)])
        x = torch.randn(1, k, device="cuda", generator=generator)
        each = [torch.tensor([i], dtype=torch.int32, device="cuda") for i in range(12)]
        us = attempt(lambda: graph_ms(lambda: [matvec(linears.table, i, x, n, "mul1") for i in each]) / 12 * 1e3)  # noqa: B023
        found = matvec(linears.table, each[0], x, n, "mul1")
        wanted = x @ decode_weight(*linears.parts[0])
        error = float((found - wanted).norm() / wanted.norm())
        result[name] = {
            "us": us,
            "gbs": linears.nbytes / 12 / us / 1e3 if isinstance(us, float) else None,
            "error": error,
        }
    return result


def best_of(variants: dict[str, Any], key: str) -> str:
    """The name of the fastest variant that ran."""
    return min(
        (name for name, figures in variants.items() if isinstance(figures, dict)), key=lambda name: variants[name][key]
    )
