"""What a correction behind a quantized prefix takes at GLM-5.3's shapes: its sums and solves on one GPU.

    python -m keys35.bench.prefix --out reports/benchmarks/prefix-solves-h200.json
"""

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from keys35 import __version__
from keys35.bench.timing import milliseconds
from keys35.calibration.correction import PairedInputs
from keys35.files.atomic import write_json
from keys35.report.machine import machine
from keys35.stages.prefix_cost import OF_AN_EXPERT

GATE_UP, DOWN = OF_AN_EXPERT
CASES = {GATE_UP: (6144, 4096, 14336), DOWN: (2048, 6144, 14336), "o_proj": (16384, 6144, 24576)}
"""Inputs, outputs, and rows that are summed at a time: an expert's mean share of 224 windows, a pass's tokens."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    cases = {name: _case(*sizes) for name, sizes in CASES.items()}
    result = {
        "command": " ".join(["python", "-m", "keys35.bench.prefix", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": {"keys35": __version__, "torch": torch.__version__},
        "machine": machine(),
        "cases": cases,
    }
    write_json(options.out, result)
    print(*(f"{name}: {case}" for name, case in cases.items()), sep="\n")


def _case(inputs: int, outputs: int, rows: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(inputs)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    source = torch.randn(rows, inputs, device="cuda", generator=generator)
    found = source + 0.1 * torch.randn(rows, inputs, device="cuda", generator=generator)
    weight = 0.02 * torch.randn(inputs, outputs, device="cuda", generator=generator)
    half = torch.arange(rows, device="cuda") % 2 == 0
    sums = PairedInputs()
    summing = milliseconds(lambda: sums.add(source, found, half), 3)
    solving = milliseconds(lambda: sums.corrected(weight), 3)
    return {
        "inputs": inputs, "outputs": outputs, "rows": rows, "sum_ms": round(summing, 2), "solve_ms": round(solving, 2),
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
    }


if __name__ == "__main__":
    main()
