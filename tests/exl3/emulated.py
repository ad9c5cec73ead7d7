"""Runs this project's CUDA kernels on a CPU, a fibre a thread: right or wrong is known before a GPU is at hand."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from keys35.exl3.gpu.compile import whole_source

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


@lru_cache
def build(source: str, symbol: str, defines: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    """A kernel as a library with a function `emulate(grid x, grid y, threads, shared bytes, arguments...)`."""
    text = whole_source(source).replace(whole_source("ptx.cuh"), '#include "cuda_on_cpu.h"\n')
    parameters = re.search(rf"\b{symbol}\(([^)]*)\)\s*\{{", text)[1]
    names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
    text += f"""
extern "C" void emulate(unsigned grid_x, unsigned grid_y, unsigned block_x, size_t shared_bytes, {parameters}) {{
    run(Index{{grid_x, grid_y, 1}}, block_x, shared_bytes, [&] {{ {symbol}({names}); }});
}}"""
    name = "-".join([symbol, *(f"{key}{value}" for key, value in defines)])
    code, library = folder / f"{name}.cpp", folder / f"{name}.so"
    code.write_text(text)
    command = [COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}", *flags(dict(defines))]
    subprocess.run([*command, str(code), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def flags(defines: Mapping[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in defines.items()]
