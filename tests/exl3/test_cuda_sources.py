"""The CUDA sources compile for every architecture, without a GPU; registers and spills are printed."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from keys35.errors import EncodeError
from keys35.exl3.gpu.compile import Cubin, cached_cubin, compile_source, compiler
from keys35.exl3.gpu.packed import BFLOAT16, PRODUCT

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")


def has_compiler() -> bool:
    try:
        return bool(compiler())
    except EncodeError:
        return False


pytestmark = pytest.mark.skipif(not has_compiler(), reason="neither NVRTC (the gpu extra) nor nvcc is installed")


def sources(arch: str) -> list[tuple[str, str, dict[str, int]]]:
    """Every source with settings; on sm_90 the widths that must not spill and the MTP experts', elsewhere one."""
    widths = (2, 3, 4, 5, 8) if arch == "sm_90" else (3,)
    fast = [("viterbi.cu", arch, {"BITS": bits, "THREADS": 256}) for bits in widths]
    half = ("viterbi_any.cu", arch, {"WHOLE": 2, "HALF": 1, "THREADS": 512})
    packed = [
        ("reconstruct.cu", arch, dict(BFLOAT16.defines("mul1", brain=True))),
        *(("matvec.cu", arch, dict(PRODUCT.defines("mul1", experts, wide=not experts))) for experts in (True, False)),
    ]
    return [*fast, half, ("rotate.cu", arch, {}), *packed]


def test_all_architectures_compile_without_spills(capsys: pytest.CaptureFixture) -> None:
    jobs = [job for arch in ARCHITECTURES for job in sources(arch)]
    with ThreadPoolExecutor() as pool:
        cubins: list[Cubin] = list(pool.map(lambda job: compile_source(*job), jobs))
    for (name, arch, settings), cubin in zip(jobs, cubins, strict=True):
        assert cubin.code[:4] == b"\x7fELF"
        used = cubin.resources()
        with capsys.disabled():
            print(f"\n{arch:8} {name:15} {settings} {used}", end="")
        if arch == "sm_90" and (settings.get("BITS") in (2, 3, 4, 5) or name in ("reconstruct.cu", "matvec.cu")):
            assert used["spill_stores"] == used["spill_loads"] == 0


def test_cubins_are_cached_by_their_settings(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("KEYS35_CACHE", str(tmp_path))
    caplog.set_level("INFO")
    first = cached_cubin("rotate.cu", "sm_90", {})
    assert "first use" in caplog.text
    caplog.clear()
    assert cached_cubin("rotate.cu", "sm_90", {}) == first
    assert not caplog.text
    cached_cubin("rotate.cu", "sm_80", {})
    assert "first use" in caplog.text
    assert len(list(tmp_path.rglob("*.cubin"))) == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_a_source_that_does_not_compile_says_so(monkeypatch) -> None:
    with pytest.raises(Exception, match="(?i)error"):
        compile_source("viterbi.cu", "sm_90", {"BITS": 3, "THREADS": 0})
