"""`python -m keys35.bench.runtime`: the packed kernels at GLM-5.3's shapes on one GPU, beside plain torch.

Synthetic experts with layer 3's published widths (81, 158 and 17 of 2, 3 and 4 bits: 2.75 in the mean). Measures the
bandwidth of a copy; reconstruction of a whole layer; one MoE layer for 2,048 tokens; one token through 8 experts.
"""

import argparse
import datetime
import importlib.metadata
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import __version__
from ..exl3.codebook import codebook_table, marker_tensor
from ..exl3.gpu import packed as kernels
from ..exl3.gpu.compile import cached_cubin, compiler
from ..exl3.gpu.launch import Limits
from ..exl3.gpu.packed import Product, Reconstruction, experts, matvec, reconstruct_into
from ..exl3.hadamard import BLOCK
from ..exl3.linear import decode_weight
from ..exl3.packed import PackedLinears
from ..exl3.tiles import from_ring, unpack
from ..files.atomic import write_json
from ..glm import experts as layer_experts
from ..glm.experts import RoutedExperts
from .timing import milliseconds

D, INNER, TOKENS, TOP = 6144, 2048, 2048, 8
WIDTHS = [2] * 81 + [3] * 158 + [4] * 17
SETS = 16  # different groups of eight experts, so that none comes from the cache

RECONSTRUCTIONS = [
    Reconstruction(exact, packed, narrow, blocks)
    for exact, packed, narrow, blocks in [
        (False, False, False, 2), (False, False, True, 2), (True, False, True, 2), (False, True, False, 2),
        (False, True, True, 2), (False, True, True, 3), (False, True, False, 3),
    ]
]  # fmt: skip
PRODUCTS = [
    Product(columns, unroll, blocks, ring, mixed, slice_in, slice_out)
    for (columns, unroll, blocks, ring), mixed, (slice_in, slice_out) in product(
        [(4, 2, 4, 4096), (4, 4, 3, 4096), (2, 4, 4, 4096), (4, 4, 3, 6144), (4, 2, 3, 4096), (2, 4, 3, 4096)],
        (False, True),
        [(768, 512), (1024, 512), (512, 512), (768, 1024), (768, 256), (384, 256), (1024, 1024)],
    )
]


def graph_ms(run: Callable[[], Any], times: int = 9) -> float:
    """The same for a call captured as a graph, which leaves out Python's share of many small launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay, times)


def linear(k: int, n: int, bits: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A random encoded matrix on the GPU; any words are a legal trellis."""
    words = torch.randint(
        -32768, 32768, (k // 16, n // 16, 16 * bits), dtype=torch.int16, device="cuda", generator=generator
    )
    suh, svh = (torch.randn(size, device="cuda", generator=generator).sign() for size in (k, n))
    return {"trellis": words, "suh": (suh * 0.02).half(), "svh": svh.half(), "mul1": marker_tensor("mul1")}


def layer(widths: Sequence[int], seed: int = 0) -> RoutedExperts:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(D, INNER), (D, INNER), (INNER, D)]
    return RoutedExperts([linear(*shape, bits, generator) for bits in widths for shape in shapes])


def torch_decode(trellis: Tensor, suh: Tensor, svh: Tensor) -> Tensor:
    """The plain torch implementation: states, a table, the tile order, and both rotations as matrix products."""
    signs = torch.ones(1, 1, device=trellis.device)
    for _ in range(7):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    h = signs * BLOCK**-0.5
    w = from_ring(codebook_table("mul1", str(trellis.device))[unpack(trellis)])
    k, n = w.shape
    w = (h @ w.view(k // BLOCK, BLOCK, n)).reshape(k, n // BLOCK, BLOCK) @ h
    return (suh.float()[:, None] * w.reshape(k, n) * svh.float()).bfloat16()


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


def one_token(routed: RoutedExperts, x: Tensor, ids: Sequence[int], weights: Tensor) -> Tensor:
    total = torch.zeros(D, device="cuda")
    for expert, weight in zip(ids, weights, strict=True):
        gate, up, down = (decode_weight(*routed.linears.parts[3 * expert + part]) for part in range(3))
        total += weight * ((F.silu(x @ gate) * (x @ up)) @ down)
    return total


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


def compile_all() -> None:
    """All variants' kernels, side by side."""
    arch = Limits.of(torch.cuda.current_device()).arch
    jobs = {("reconstruct.cu", how.defines("mul1", True)) for how in RECONSTRUCTIONS}
    jobs |= {("matvec.cu", how.defines("mul1")) for how in PRODUCTS}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: attempt(lambda: cached_cubin(job[0], arch, dict(job[1]))), jobs))


def attempt(run: Callable[[], Any]) -> Any:
    """A variant that fails is a result too."""
    try:
        return run()
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {error}"[:300]


def run(say: Callable[[str], None]) -> dict[str, Any]:
    started = time.perf_counter()

    def note(text: str) -> None:
        say(f"[{time.perf_counter() - started:6.1f} s] {text}")

    packages = ["torch", "cuda-core", "numpy"]
    result: dict[str, Any] = {
        "command": " ".join(["python -m keys35.bench.runtime", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": {"keys35": __version__, "compiler": " ".join(compiler()), "cuda": torch.version.cuda}
        | {package: importlib.metadata.version(package) for package in packages},
        "shapes": {
            "hidden": D,
            "inner": INNER,
            "experts": len(WIDTHS),
            "top_k": TOP,
            "mean_bits": sum(WIDTHS) / len(WIDTHS),
        },
    }
    compile_all()
    note("compiled")
    result["copy_gbs"] = copy = measure_copy()
    note(f"copy {copy:.0f} GB/s")
    result["decode"] = measure_decode(copy)
    ranked = sorted(
        result["decode"]["variants"].items(), key=lambda item: item[1]["us"] if isinstance(item[1], dict) else 1e9
    )
    for how, figures in ranked[:10] + ranked[-2:]:
        note(f"{how}: {figures}")
    note(str({key: value for key, value in result["decode"].items() if key != "variants"}))
    torch.cuda.empty_cache()
    result["linears"] = measure_linears()
    note(str(result["linears"]))
    order = torch.randperm(len(WIDTHS), generator=torch.Generator().manual_seed(0)).tolist()
    routed = layer([WIDTHS[i] for i in order])
    result["reconstruct"] = measure_reconstruct(routed, copy)
    note(str(result["reconstruct"]))
    kernels.BFLOAT16 = next(how for how in RECONSTRUCTIONS if str(how) == result["reconstruct"]["best"])
    torch.cuda.empty_cache()
    result["exllamav3"] = attempt(lambda: measure_peer(routed, copy))
    note(str(result["exllamav3"]))
    torch.cuda.empty_cache()
    result["moe"] = measure_moe(routed)
    note(str(result["moe"]))
    result["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("reports/benchmarks/runtime-h200.json"))
    options = parser.parse_args(arguments)
    result = run(lambda text: print(text, flush=True))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, result)


if __name__ == "__main__":
    main()
