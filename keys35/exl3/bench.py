"""`python -m keys35.exl3.bench`: how fast and how good the encoder is on this machine.

Prints three tables: milliseconds per tile and core, the error left of Gaussian tiles beside the rate-distortion
limit, and proxy errors on the golden matrix beside those of the encoder that made it (when the file is at hand).
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from .codebook import codebook_table
from .encode import EncodeOptions, LinearJob, encode_group
from .scale import best_scale
from .tiles import RING
from .viterbi import ViterbiBackend, get_backend

WIDTHS = (2.0, 3.0, 4.0, 5.0, 8.0)
GOLDEN = Path(__file__).parents[2] / "tests/exl3/data/golden.safetensors"


def time_and_error(backend: ViterbiBackend, bits: float, tiles: torch.Tensor) -> tuple[float, float]:
    """Seconds for encoding unit Gaussian tiles (T, 256), and their mean squared error over their mean square."""
    scaled = tiles * best_scale(bits)
    backend.encode_tiles(scaled[:16], bits)  # compiles, and allocates the work memory
    begin = time.perf_counter()
    states = backend.encode_tiles(scaled, bits)
    if tiles.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    values = codebook_table("mul1", str(tiles.device))[states.view(torch.int16).int() & 0xFFFF]
    error = (values - scaled).double().square().mean() / scaled.double().square().mean()
    return seconds, float(error)


def golden_errors(
    path: Path, options: EncodeOptions, widths: Sequence[float] = WIDTHS
) -> dict[float, tuple[float, float]]:
    """Proxy errors on the golden matrix by width: ours and the one its file records."""
    data = load_file(path)
    hessian = data["hessian_sum"] / data["hessian_count"]
    jobs = [LinearJob("golden", data["weight_in_out"], "golden")]
    encoded = encode_group(jobs, {"golden": hessian}, widths, options, seed=0)
    return {
        bits: (encoded["golden", bits].proxy_error, float(data[f"k{bits:g}.proxy_error"])) for bits in widths
    }


def report(backend_name: str, tiles_per_width: int, widths: Sequence[float], golden: Path) -> str:
    """The tables as text."""
    backend = get_backend(backend_name)
    device = "cpu" if backend.name == "cpu" else "cuda"
    cores = torch.get_num_threads() if device == "cpu" else 1
    tiles = torch.randn(tiles_per_width, RING, generator=torch.Generator().manual_seed(0)).to(device)
    lines = [
        f"backend {backend.name}, {tiles_per_width} tiles, {cores} cores",
        "bits  ms/tile/core  Mweights/s  NMSE       over 2^-2K",
    ]
    for bits in widths:
        seconds, error = time_and_error(backend, bits, tiles)
        per_tile = seconds / tiles_per_width
        speed = RING / per_tile / 1e6
        lines.append(
            f"{bits:4g}  {1e3 * per_tile * cores:12.3f}  {speed:10.3f}  {error:.3e}  {error * 4**bits:.3f}"
        )
    if golden.is_file():
        lines += ["", "golden matrix, proxy error", "bits  keys35     exllamav3  ratio"]
        for bits, (ours, theirs) in golden_errors(golden, EncodeOptions(backend=backend_name)).items():
            lines.append(f"{bits:4g}  {ours:.3e}  {theirs:.3e}  {ours / theirs:.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--backend", default="auto", help="auto, cpu, cuda or exllamav3")
    parser.add_argument("--tiles", type=int, default=256, help="tiles per width")
    parser.add_argument("--widths", type=float, nargs="+", default=WIDTHS, help="bits per weight")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="the golden file")
    options = parser.parse_args(arguments)
    print(report(options.backend, options.tiles, options.widths, options.golden))


if __name__ == "__main__":
    main()
