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
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..exl3.gpu import packed as kernels
from ..exl3.gpu.compile import cached_cubin, compiler
from ..exl3.gpu.launch import Limits
from ..files.atomic import write_json
from .moe import measure_moe
from .packed import (
    PRODUCTS,
    RECONSTRUCTIONS,
    measure_copy,
    measure_decode,
    measure_linears,
    measure_peer,
    measure_reconstruct,
)
from .synthetic import INNER, TOP, WIDTHS, D, layer
from .timing import attempt


def compile_all() -> None:
    """All variants' kernels, side by side."""
    arch = Limits.of(torch.cuda.current_device()).arch
    jobs = {("reconstruct.cu", how.defines("mul1", True)) for how in RECONSTRUCTIONS}
    jobs |= {("matvec.cu", how.defines("mul1", experts=True, wide=False)) for how in PRODUCTS}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: attempt(lambda: cached_cubin(job[0], arch, dict(job[1]))), jobs))


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
