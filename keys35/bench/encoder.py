"""`python -m keys35.bench.encoder`: the GPU encoder and exllamav3's, in one run on the same inputs.

Measures the tile search by width, then batches of experts end to end (weights and Hessians on the host in, packed
tensors on the host out), at GLM-5.3's shapes. Writes JSON and prints Markdown tables.
"""

import argparse
import datetime
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..exl3.codebook import codebook_table
from ..exl3.encode import EncodedLinear, EncodeOptions, encode_group
from ..exl3.gpu.compile import compile_source, compiler
from ..exl3.gpu.launch import Limits
from ..exl3.linear import decode_weight
from ..exl3.scale import best_scale
from ..exl3.tiles import RING, pack
from ..exl3.viterbi import get_backend
from ..exl3.viterbi.cuda import plan_launch, scratch_bytes
from ..files.atomic import write_json
from . import peer
from .layers import Batch, down_batch, gate_up_batch
from .timing import milliseconds

EXPERT_WEIGHTS = 734.4e9
"""Weights of all routed experts of GLM-5.3."""
CANDIDATES = (2, 3, 4)
OPTIONS = EncodeOptions(backend="cuda")


def measure_kernel(bits: int, with_peer: bool) -> dict[str, float]:
    """Mweights/s and the error of unit Gaussian tiles, ours and the peer's."""
    count = 96 * torch.cuda.get_device_properties(0).multi_processor_count
    scale = best_scale(bits)
    tiles = torch.randn(count, RING, device="cuda", generator=torch.Generator("cuda").manual_seed(bits)) * scale
    table = codebook_table("mul1", "cuda")
    encoders: dict[str, tuple[Callable[[Tensor, int], Tensor], int]] = {"ours": (get_backend("cuda").encode_tiles, 7)}
    if with_peer:
        encoders["peer"] = peer.encode_tiles, 3
    result: dict[str, float] = {"scratch_bytes": scratch_bytes(bits, count)}
    for who, (encode, times) in encoders.items():
        ms = milliseconds(lambda encode=encode: encode(tiles, bits), times)
        values = table[encode(tiles, bits).view(torch.int16).int() & 0xFFFF]
        result[f"{who}_mws"] = tiles.numel() / ms / 1e3
        result[f"{who}_nmse"] = float((values - tiles).double().square().mean() / tiles.double().square().mean())
    if with_peer:
        peer.release()
    return result


def measure_decoding(bits: int) -> dict[str, float]:
    """Gweights/s and GB/s of packing, and of decoding an expert's matrix to bfloat16."""
    states = get_backend("cuda").encode_tiles(torch.randn(4096, RING, device="cuda"), bits).view(torch.int16)
    states = states.repeat(12, 1).view(384, 128, RING)
    trellis = pack(states, bits)
    suh, svh = torch.ones(6144, device="cuda").half(), torch.ones(2048, device="cuda").half()
    packing = milliseconds(lambda: pack(states, bits), 9)
    decoding = milliseconds(lambda: decode_weight(trellis, suh, svh, dtype=torch.bfloat16), 9)
    moved = states.numel() * (bits / 8 + 2)
    return {
        "pack_gws": states.numel() / packing / 1e6,
        "decode_gws": states.numel() / decoding / 1e6,
        "decode_gbs": moved / decoding / 1e6,
    }


def proxy_errors(batch: Batch, encoded: Mapping[tuple[str, float], EncodedLinear], bits: float) -> float:
    """Mean of tr(E^T H E) / tr(W^T H W) in the weights' own basis, from the stored tensors."""
    total = 0.0
    for job in batch.jobs:
        parts = encoded[job.name, bits]
        hessian, weight = batch.hessians[job.hessian].cuda(), job.weight.cuda().float()
        wrong = weight - decode_weight(parts.trellis.cuda(), parts.suh.cuda(), parts.svh.cuda())
        total += float((wrong * (hessian @ wrong)).double().sum() / (weight * (hessian @ weight)).double().sum())
    return total / len(batch.jobs)


def timed(run: Callable[[], Any], times: int) -> tuple[Any, float, int]:
    """A call's result, its median seconds, and the most bytes of GPU memory it held."""
    seconds = []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return result, statistics.median(seconds), torch.cuda.max_memory_allocated()


def measure_batch(batch: Batch, bits: int, times: int, with_peer: bool) -> dict[str, Any]:
    """One width of a batch end to end; the peer takes the first sixteen matrices, its largest group."""
    encoded, seconds, peak = timed(lambda: encode_group(batch.jobs, batch.hessians, [bits], OPTIONS, 0), times)
    part = batch.first(peer.LARGEST_GROUP)
    result = {
        "matrices": len(batch.jobs),
        "weights": batch.weights,
        "ours_seconds": seconds,
        "ours_mws": batch.weights / seconds / 1e6,
        "ours_proxy_error": proxy_errors(part, encoded, float(bits)),
        "ours_peak_bytes": peak,
    }
    if with_peer:
        found, seconds, peak = timed(lambda: peer.encode_batch(part, bits), 1)
        result |= {
            "peer_matrices": len(part.jobs),
            "peer_seconds": seconds,
            "peer_mws": part.weights / seconds / 1e6,
            "peer_proxy_error": proxy_errors(part, found, float(bits)),
            "peer_peak_bytes": peak,
        }
        peer.release()
    return result


def measure_widths(batches: Sequence[Batch]) -> dict[str, Any]:
    """All candidate widths at once against one after the other."""

    def seconds(widths: Sequence[int]) -> float:
        return sum(
            timed(lambda batch=batch: encode_group(batch.jobs, batch.hessians, widths, OPTIONS, 0), 1)[1]
            for batch in batches
        )

    weights = sum(batch.weights for batch in batches)
    together, alone = seconds(CANDIDATES), {str(bits): seconds([bits]) for bits in CANDIDATES}
    return {
        "widths": list(CANDIDATES),
        "weights": weights,
        "together_seconds": together,
        "alone_seconds": alone,
        "saved": 1 - together / sum(alone.values()),
        "mws_a_width": len(CANDIDATES) * weights / together / 1e6,
    }


PARTS = {
    "tile search": ("viterbi",),
    "matrix products": ("gemm", "cutlass", "syrk"),
    "factorisations": ("potrf", "getrf", "trsm", "cholesky"),
    "rotations and decoding": ("rotate", "reconstruct"),
    "transfers": ("Memcpy HtoD", "Memcpy DtoH"),
}


def measure_parts(batch: Batch) -> dict[str, float]:
    """Milliseconds on the GPU by kind of kernel, for one width of a batch."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        encode_group(batch.jobs, batch.hessians, [3], OPTIONS, 0)
        torch.cuda.synchronize()
    parts = dict.fromkeys([*PARTS, "everything else"], 0.0)
    for event in profile.key_averages():
        if event.self_device_time_total and not event.key.startswith(("aten::", "cuda", "Command")):
            kind = next((part for part, words in PARTS.items() if any(w in event.key for w in words)), None)
            parts[kind or "everything else"] += event.self_device_time_total / 1e3
    return parts


def measure_memory(batch: Batch) -> dict[str, int]:
    """Peak bytes by `stack_elements`, the setting that lowers it. More experts add nothing: they follow in stacks."""
    peaks = {}
    for elements in (3 << 27, 1 << 28, 1 << 27):
        options = replace(OPTIONS, stack_elements=elements)
        _, _, peak = timed(lambda options=options: encode_group(batch.jobs, batch.hessians, [3], options, 0), 1)
        peaks[str(elements)] = peak
    return peaks


def projection(kernel_free_mws: float, mws_a_width: float) -> dict[str, float]:
    """GPU-hours for all routed experts of GLM-5.3, from measured end-to-end rates."""
    hours = EXPERT_WEIGHTS / 3600e6
    return {
        "one_width_gpu_hours": hours / kernel_free_mws,
        "three_widths_gpu_hours": len(CANDIDATES) * hours / mws_a_width,
    }


def layer_rate(batches: Mapping[str, Mapping[str, float]], who: str) -> float:
    """Mweights/s over gate, up and down, two parts of the first to one of the second."""
    gate_up, down = (next(b for name, b in batches.items() if name.startswith(kind)) for kind in ("gate_up", "down"))
    return 3 / (2 / gate_up[f"{who}_mws"] + 1 / down[f"{who}_mws"])


def measure_compiling() -> float:
    """Seconds that the first use of the candidate widths takes, with nothing in the cache."""
    limits, begun = Limits.of(0), time.perf_counter()
    for bits in CANDIDATES:
        launch = plan_launch(1, bits, limits)
        compile_source(launch.source, limits.arch, dict(launch.settings))
    compile_source("rotate.cu", limits.arch, {})
    return time.perf_counter() - begun


def surroundings(with_peer: bool) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = {
        "keys35": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0],
        "compiler": " ".join(compiler()),
        "python": platform.python_version(),
    }
    if with_peer:
        versions["exllamav3"] = importlib.metadata.version("exllamav3")
    return {
        "command": " ".join(["python", "-m", "keys35.bench.encoder", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": versions,
    }


def run(experts: Sequence[int], with_peer: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Every measurement; `say` hears each figure as it comes."""
    result = surroundings(with_peer) | {"compile_seconds": measure_compiling(), "kernel": {}, "end_to_end": {}}
    say(f"compile: {result['compile_seconds']:.1f} s")
    for bits in (2, 3, 4, 5, 8):
        result["kernel"][str(bits)] = measure_kernel(bits, with_peer)
        say(f"kernel {bits}: {result['kernel'][str(bits)]}")
    result["decoding"] = {str(bits): measure_decoding(bits) for bits in CANDIDATES}
    say(f"decoding: {result['decoding']}")
    for count in experts:
        batches = [gate_up_batch(count), down_batch(count)]
        encode_group(batches[0].jobs[:1], batches[0].hessians, CANDIDATES, OPTIONS, 0)  # compiles, loads libraries
        for batch in batches:
            first = count == experts[0]
            result["end_to_end"][batch.name] = measure_batch(batch, 3, 3 if first else 1, with_peer)
            say(f"{batch.name}: {result['end_to_end'][batch.name]}")
        if first:
            result["widths"] = measure_widths(batches)
            say(f"widths: {result['widths']}")
            result["parts_ms"] = {batch.name: measure_parts(batch.first(20)) for batch in batches}
            say(f"parts: {result['parts_ms']}")
            result["memory"] = {batch.name: measure_memory(batch) for batch in batches}
            say(f"memory: {result['memory']}")
    rate = layer_rate(result["end_to_end"], "ours")
    result["projection"] = {"layer_mws": rate} | projection(rate, result["widths"]["mws_a_width"])
    return result


def table(result: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| tile search | 2 bits | 3 bits | 4 bits | 5 bits | 8 bits |", "|---|---:|---:|---:|---:|---:|"]
    rows = {"keys35, Mweights/s": "ours_mws", "exllamav3, Mweights/s": "peer_mws"}
    rows |= {"keys35, NMSE": "ours_nmse", "exllamav3, NMSE": "peer_nmse"}
    for title, key in rows.items():
        if all(key in figures for figures in result["kernel"].values()):
            shown = [f"{f[key]:.1f}" if key.endswith("mws") else f"{f[key]:.6f}" for f in result["kernel"].values()]
            lines.append(f"| {title} | " + " | ".join(shown) + " |")
    lines += ["", "| 3 bits, end to end | Mweights/s | exllamav3 | proxy error | exllamav3 | peak GiB |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, f in result["end_to_end"].items():
        theirs = (f"{f['peer_mws']:.1f}", f"{f['peer_proxy_error']:.6f}") if "peer_mws" in f else ("", "")
        ours = f"{f['ours_mws']:.1f} | {theirs[0]} | {f['ours_proxy_error']:.6f} | {theirs[1]}"
        lines.append(f"| {name} | {ours} | {f['ours_peak_bytes'] / 2**30:.1f} |")
    hours, saved = result["projection"], 100 * result["widths"]["saved"]
    lines += [
        "",
        f"GLM-5.3's routed experts, {EXPERT_WEIGHTS / 1e9:.1f} G weights: "
        f"{hours['one_width_gpu_hours']:.1f} GPU-hours for 3 bits, {hours['three_widths_gpu_hours']:.1f} for "
        f"2, 3 and 4 bits at once ({saved:.0f} % less than one by one).",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 64], help="experts a batch")
    parser.add_argument("--out", type=Path, default=Path("reports/benchmarks/encoder-h200.json"))
    parser.add_argument("--no-peer", action="store_true", help="leave exllamav3 out")
    options = parser.parse_args(arguments)
    result = run(options.experts, not options.no_peer, lambda text: print(text, flush=True))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
