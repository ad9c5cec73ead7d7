"""CUDA source to cubin at run time: NVRTC through cuda-core, nvcc if that is missing, and a cache on disk.

The sources include no headers, so NVRTC alone is enough: no toolkit, no build step. A cubin is cached under
the hash of everything that shapes it: source, settings, architecture and compiler version.
"""

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...errors import EncodeError

log = logging.getLogger(__name__)

_IMPORT = threading.Lock()  # cuda.core shows itself half made to a thread that imports it beside another

_GUARD, _LOCKS = threading.Lock(), {}

OLDEST_CAPABILITY = (8, 0)
"""Packed half minima, warp-wide reductions and 64 K registers a multiprocessor start here."""


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, with the assembler's report on it."""

    code: bytes
    report: str

    def resources(self) -> dict[str, int]:
        """Registers a thread and bytes spilled, as the assembler reported them; empty when it said nothing."""
        patterns = {
            "registers": r"Used (\d+) registers",
            "spill_stores": r"(\d+) bytes spill stores",
            "spill_loads": r"(\d+) bytes spill loads",
        }
        found = {name: re.search(pattern, self.report) for name, pattern in patterns.items()}
        return {name: int(match.group(1)) for name, match in found.items() if match}


def cache_directory() -> Path:
    """Where cubins are kept: KEYS35_CACHE, else the user's cache directory."""
    root = os.environ.get("KEYS35_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "keys35" / "kernels"


@lru_cache
def compiler() -> tuple[str, str]:
    """The compiler that will be used and its version: ("nvrtc", "13.0") or ("nvcc", ...).

    Raises EncodeError when there is none.
    """
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        try:
            from cuda.bindings import nvrtc

            error, major, minor = nvrtc.nvrtcVersion()
            if error == nvrtc.nvrtcResult.NVRTC_SUCCESS:
                return "nvrtc", f"{major}.{minor}"
        except (ImportError, RuntimeError) as problem:
            log.info("NVRTC cannot be loaded (%s); looking for nvcc", problem)
    if path := shutil.which("nvcc"):
        banner = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        return "nvcc", banner.strip().splitlines()[-1]
    raise EncodeError(
        "no CUDA compiler: neither NVRTC (pip install 'keys35[gpu]') nor nvcc was found; "
        "install one, or use the cpu backend"
    )


def _with_nvrtc(source: str, arch: str, defines: Mapping[str, int]) -> Cubin:
    import io

    with _IMPORT:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        ptxas_options=["-v"],
        define_macro=[(name, str(value)) for name, value in defines.items()] or None,
    )
    messages = io.StringIO()
    program = Program(source, "c++", options)
    try:
        return Cubin(bytes(program.compile("cubin", logs=messages).code), messages.getvalue())
    finally:
        program.close()


def _with_nvcc(source: str, arch: str, defines: Mapping[str, int]) -> Cubin:
    with tempfile.TemporaryDirectory() as folder:
        code, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.cu")
        text.write_text(source)
        macros = [f"-D{name}={value}" for name, value in defines.items()]
        options = ["-cubin", f"-arch={arch}", "-std=c++17", "-Xptxas", "-v", *macros]
        done = subprocess.run(["nvcc", *options, str(text), "-o", str(code)], capture_output=True, text=True)
        if done.returncode:
            raise EncodeError(f"nvcc failed on {text.name} for {arch}:\n{done.stderr}")
        return Cubin(code.read_bytes(), done.stderr)


def compile_source(name: str, arch: str, defines: Mapping[str, int]) -> Cubin:
    """Compile one of this package's sources, without the cache; needs no GPU.

    name: file name beside this module; arch: "sm_90" and the like; defines: compile-time settings.
    Raises EncodeError when there is no compiler or it refuses.
    """
    kind, _ = compiler()
    return (_with_nvrtc if kind == "nvrtc" else _with_nvcc)(whole_source(name), arch, defines)


def whole_source(name: str) -> str:
    """The text of a source of this package with the files it includes in their places."""
    text = (Path(__file__).parent / name).read_text()
    return re.sub(r'^#include "(.+)"$', lambda match: whole_source(match[1]), text, flags=re.MULTILINE)


def cached_cubin(name: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """The machine code of a source, from the cache on disk or compiled into it."""
    source = whole_source(name).encode()
    settings = repr((name, arch, sorted(defines.items()), compiler())).encode()
    path = cache_directory() / f"{Path(name).stem}-{arch}-{hashlib.sha256(source + settings).hexdigest()[:24]}.cubin"
    with _at_work(path):
        return _cached(path) or _compile_into(path, name, arch, defines)


@contextlib.contextmanager
def _at_work(path: Path) -> Iterator[None]:
    """One thread at a time for one cubin."""
    with _GUARD:
        lock = _LOCKS.setdefault(path, threading.Lock())
    with lock:
        yield


def _cached(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _compile_into(path: Path, name: str, arch: str, defines: Mapping[str, int]) -> bytes:
    shown = ", ".join(f"{key} {value}" for key, value in defines.items())
    log.info("first use: compiling %s (%s) for %s; kept in %s", name, shown, arch, path.parent)
    begun = time.perf_counter()
    code = compile_source(name, arch, defines).code
    log.info("compiled %s in %.1f s", name, time.perf_counter() - begun)
    _keep(path, code)
    return code


def compile_ahead(sources: Iterable[tuple[str, Mapping[str, int]]], arch: str) -> None:
    """Start compiling what the cache lacks, side by side and in the background; a first use waits for its own."""
    if compiler()[0] == "nvrtc":
        from cuda.core import Device, ObjectCode, Program  # noqa: F401  imported by two threads at once, it breaks
    for name, defines in sources:
        threading.Thread(target=_quietly, args=(name, arch, dict(defines)), daemon=True).start()


def _quietly(name: str, arch: str, defines: Mapping[str, int]) -> None:
    """Whoever needs the kernel meets the same refusal again, with the message."""
    with contextlib.suppress(EncodeError, RuntimeError):
        cached_cubin(name, arch, defines)


def _keep(path: Path, code: bytes) -> None:
    """Write a cubin under a temporary name and rename it; a cache that cannot be written only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError as problem:
        log.warning("cannot keep compiled kernels in %s (%s); the next start compiles again", path.parent, problem)
