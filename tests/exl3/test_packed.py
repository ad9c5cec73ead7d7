"""Work on encoded matrices as they are: CUDA kernels run on the CPU, the CPU fallback, and a GPU where there is one."""

import ctypes
from pathlib import Path

import pytest
import torch
from builders_exl3 import random_exl3
from emulated import COMPILER, build
from torch import Tensor

from keys35.errors import EncodeError
from keys35.exl3.codebook import CODEBOOKS, marker_tensor
from keys35.exl3.gpu.packed import BFLOAT16, HALF, PRODUCT, Cut, Product, Reconstruction
from keys35.exl3.linear import decode_weight
from keys35.exl3.packed import PackedLinears
from keys35.exl3.tiles import WIDTHS
from keys35.glm.experts import RoutedExperts

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SMALL = Product(warps=8)
"""What a GPU with 100 KB of shared memory a multiprocessor runs; quicker to emulate."""
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def encoded(k: int, n: int, bits: float, codebook: str = "mul1", seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(1000 * bits) + seed)
    parts = random_exl3((k, n), bits, generator, 0.03)
    del parts["mul1"]
    for name, size in (("suh", k), ("svh", n)):
        parts[name] = (parts[name].float() * (0.5 + torch.rand(size, generator=generator))).half()
    return parts | ({} if codebook == "3inst" else {codebook: marker_tensor(codebook)})


def decoded(parts: dict[str, Tensor], codebook: str = "mul1") -> Tensor:
    return decode_weight(parts["trellis"], parts["suh"], parts["svh"], codebook)


def mixed_experts(d: int, f: int, count: int, codebook: str = "mul1") -> list[dict[str, Tensor]]:
    """Gate, up and down of experts of 2, 3, 4, 2, .. bits."""
    shapes = [(d, f), (d, f), (f, d)]
    return [encoded(*shape, 2 + e % 3, codebook, 3 * e + i) for e in range(count) for i, shape in enumerate(shapes)]


def plain_experts(parts: list[dict[str, Tensor]], chosen: Tensor, weights: Tensor, x: Tensor, codebook: str) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.double)
    for token, ids in enumerate(chosen.tolist()):
        for slot, expert in enumerate(ids):
            gate, up, down = (decoded(parts[3 * expert + i], codebook).double() for i in range(3))
            row = x[token].double()
            total[token] += weights[token, slot].double() * ((torch.nn.functional.silu(row @ gate) * (row @ up)) @ down)
    return total


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted.double()).norm() / wanted.double().norm())


def case(seed: int, tokens: int, d: int, experts: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:each] for _ in range(tokens)]).int()
    return chosen, torch.rand(tokens, each, generator=generator), 3 * torch.randn(tokens, d, generator=generator)


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def table(parts: list[dict[str, Tensor]]) -> Tensor:
    return torch.tensor([
        [*(p[name].data_ptr() for name in ("trellis", "suh", "svh")), p["trellis"].shape[0] * 16,
         p["trellis"].shape[1] * 16, p["trellis"].shape[2] // 8] for p in parts
    ])  # fmt: skip


@emulated
@pytest.mark.parametrize(
    ("codebook", "brain", "how"),
    [
        ("mul1", True, BFLOAT16),
        ("mul1", False, HALF),
        ("mcg", True, Reconstruction(warps=16, ahead=1)),
        ("3inst", False, HALF),
    ],
)
def test_the_reconstruct_kernel_on_a_cpu(codebook: str, brain: bool, how: Reconstruction, tmp_path: Path) -> None:
    """Every width in one launch, shapes and strides of their own, all written, within the output's own rounding."""
    library = build("reconstruct.cu", "reconstruct_all", how.defines(codebook, brain), tmp_path)
    widths = WIDTHS if codebook == "mul1" else (2, 3)
    parts = [encoded(128 * (1 + i % 2), 128 * (2 - i % 2), bits, codebook) for i, bits in enumerate(widths)]
    wanted, dtype = [decoded(p, codebook) for p in parts], torch.bfloat16 if brain else torch.half
    outs = [torch.full((w.shape[0], w.shape[1] + 8), torch.nan, dtype=dtype)[:, : w.shape[1]] for w in wanted]
    places = torch.tensor([[out.data_ptr(), out.stride(0)] for out in outs])
    which, rows = torch.arange(len(parts), dtype=torch.int32), table(parts)
    shared = ctypes.c_size_t(how.shared_bytes())
    library.emulate(2, len(parts), 32 * how.warps, shared, pointer(rows), pointer(which), pointer(places))
    for out, w in zip(outs, wanted, strict=True):
        rounding = error(w.to(dtype), w)
        assert error(out, w) < rounding * (1.05 if brain else 1.8)


@emulated
@pytest.mark.parametrize(("codebook", "how"), [("mul1", PRODUCT), ("mcg", SMALL), ("3inst", SMALL)])
def test_the_fused_expert_kernel_on_a_cpu(codebook: str, how: Product, tmp_path: Path) -> None:
    """Two tokens, three experts each, widths mixed, more slices than one, several blocks that wait for each other."""
    library = build("matvec.cu", "experts", how.defines(codebook, experts=True, wide=False), tmp_path)
    d, f, each = 512, 256, 3
    parts = mixed_experts(d, f, 4, codebook)
    chosen, weights, x = case(0, 2, d, 4, each)
    scratch, counters = torch.full((1 << 15,), torch.nan), torch.zeros(64, dtype=torch.int32)
    rows, results, shared = table(parts), [], ctypes.c_size_t(how.shared_bytes())
    for blocks in (3, 2):
        out = torch.full((2, d), torch.nan)
        library.emulate(
            blocks, 1, 32 * how.warps, shared, pointer(rows), pointer(chosen), pointer(weights), 2 * each, each, d, f,
            pointer(x), pointer(out), pointer(scratch), pointer(counters), *(1, 2, 1), *(2, 1, 2),
        )  # fmt: skip
        results.append(out)
        assert not counters.any()
    assert error(results[0], plain_experts(parts, chosen, weights, x, codebook)) < 1e-3
    assert torch.equal(*results)  # whatever the number of blocks


@emulated
@pytest.mark.parametrize(("wide", "cut"), [(True, (1, 1, 1)), (True, (1, 4, 1)), (False, (2, 2, 2))])
def test_the_product_kernel_on_a_cpu_at_every_width(wide: bool, cut: tuple[int, int, int], tmp_path: Path) -> None:
    """However a matrix is cut: slabs of 128 and 256 inputs, alone and together."""
    library = build("matvec.cu", "matvec", SMALL.defines("mul1", experts=False, wide=wide), tmp_path)
    generator = torch.Generator().manual_seed(0)
    parts = [encoded(512, 256, bits) for bits in WIDTHS if wide or bits <= 4]
    count = len(parts)
    x, y = torch.randn(count, 512, generator=generator), torch.full((count, 256), torch.nan)
    scratch, counters = torch.full((count * 4 * 256,), torch.nan), torch.zeros(2 * count, dtype=torch.int32)
    which, rows = torch.arange(count - 1, -1, -1, dtype=torch.int32), table(parts)
    library.emulate(
        3, 1, 32 * SMALL.warps, ctypes.c_size_t(SMALL.shared_bytes()), pointer(rows), pointer(which), count, 512, 256,
        pointer(x), pointer(y), pointer(scratch), pointer(counters), *cut,
    )  # fmt: skip
    for row, found, index in zip(x, y, which.tolist(), strict=True):
        assert error(found, row.double() @ decoded(parts[index]).double()) < 1e-3
    assert not counters.any()


@pytest.mark.parametrize(("shared_kib", "warps"), [(227, 24), (163, 16), (99, 8)])
def test_products_fit_every_gpu_and_every_shape(shared_kib: int, warps: int) -> None:
    """An H200, an A100, a GB10: a unit's slabs have a warp each, its sums have room, and units cover the matrix."""
    how = PRODUCT.fitting(shared_kib * 1024)
    assert how.warps == warps and how.shared_bytes() <= shared_kib * 1024
    for rows, columns, matrices in [(6144, 2048, 16), (2048, 6144, 8), (512, 6144, 8), (1152, 256, 1), (128, 128, 1)]:
        for wide in (False, True):
            cut = Cut.of(rows, columns, matrices, 132, how, wide)
            assert cut.together <= warps and cut.together * cut.breadth <= 2 * warps and cut.breadth <= warps
            assert cut.slices(rows) * cut.together * cut.deep * 128 == rows
            assert columns % (128 * cut.breadth) == 0
            assert cut.deep == 1 or not wide


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_the_cpu_decodes_and_multiplies_every_width(codebook: str) -> None:
    parts = [encoded(256, 128, bits, codebook) for bits in WIDTHS]
    linears, every = PackedLinears(parts), range(len(WIDTHS))
    outs = [torch.full((256, 128), torch.nan) for _ in parts]
    linears.reconstruct_into(every, outs)
    x = torch.randn(len(WIDTHS), 256, generator=torch.Generator().manual_seed(0))
    for p, out, row, found in zip(parts, outs, x, linears.multiply(every, x), strict=True):
        assert torch.equal(out, decoded(p, codebook))
        assert error(found, row.double() @ out.double()) < 1e-6


def test_the_cpu_runs_experts_of_mixed_widths() -> None:
    parts = mixed_experts(256, 128, 4)
    chosen, weights, x = case(1, 2, 256, 4, 3)
    wanted = plain_experts(parts, chosen, weights, x, "mul1")
    assert error(PackedLinears(parts).experts(chosen, weights, x), wanted) < 1e-6


def test_mixed_codebooks_are_refused() -> None:
    with pytest.raises(EncodeError, match="mix the codebooks mcg, mul1"):
        PackedLinears([encoded(128, 128, 2), encoded(128, 128, 2, "mcg")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routed_experts_of_half_a_rank_are_half_of_the_shares(dtype: torch.dtype) -> None:
    """What two ranks make of their halves are the same bits as the shares of one that has everything."""
    parts = mixed_experts(256, 512, 4)
    chosen, weights, x = case(2, 9, 256, 4, 3)
    whole = RoutedExperts(parts)(x.to(dtype), chosen.long(), weights, shares=4)
    assert error(whole.sum(0), plain_experts(parts, chosen, weights, x, "mul1")) < (
        1e-5 if dtype == torch.float32 else 2e-2
    )
    for rank in range(2):
        tiles, features = slice(16 * rank, 16 * rank + 16), slice(256 * rank, 256 * rank + 256)
        cut = [
            {**p, "trellis": p["trellis"][tiles], "suh": p["suh"][features]} if index % 3 == 2 else
            {**p, "trellis": p["trellis"][:, tiles], "svh": p["svh"][features]}
            for index, p in enumerate(parts)
        ]  # fmt: skip
        assert torch.equal(
            RoutedExperts(cut)(x.to(dtype), chosen.long(), weights, shares=2), whole[2 * rank : 2 * rank + 2]
        )


def to_gpu(parts: list[dict[str, Tensor]]) -> PackedLinears:
    return PackedLinears([{name: value.cuda() for name, value in p.items()} for p in parts])


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("codebook", CODEBOOKS)
    def test_reconstruction(self, codebook: str) -> None:
        parts = [encoded(128 * (1 + bits % 3), 256, bits, codebook) for bits in range(1, 9)]
        linears = to_gpu(parts)
        for dtype in (torch.bfloat16, torch.float16):
            outs = [torch.full(shape, torch.nan, dtype=dtype, device="cuda") for shape in linears.shapes]
            linears.reconstruct_into(range(8), outs)
            for p, out in zip(parts, outs, strict=True):
                w = decoded(p, codebook)
                assert error(out, w) < (1.8 if dtype == torch.float16 else 1.05) * error(w.to(dtype), w)

    @pytest.mark.parametrize("codebook", CODEBOOKS)
    def test_products(self, codebook: str) -> None:
        parts, every = [encoded(1152, 256, bits, codebook) for bits in WIDTHS], range(len(WIDTHS))
        x = torch.randn(len(WIDTHS), 1152, generator=torch.Generator().manual_seed(0))
        linears = to_gpu(parts)
        found = linears.multiply(every, x.cuda())
        assert torch.equal(found, linears.multiply(every, x.cuda()))
        for p, row, y in zip(parts, x, found, strict=True):
            assert error(y, row.double() @ decoded(p, codebook).double()) < 1e-3

    @pytest.mark.parametrize("codebook", CODEBOOKS)
    def test_experts_few_and_many_tokens(self, codebook: str) -> None:
        parts = mixed_experts(1024, 512, 6, codebook)
        routed = RoutedExperts([{name: value.cuda() for name, value in p.items()} for p in parts])
        for tokens, limit in ((1, 2e-3), (3, 2e-3), (40, 2e-2)):
            chosen, weights, x = case(tokens, tokens, 1024, 6, 4)
            x = x.bfloat16()
            arguments = (x.cuda(), chosen.long().cuda(), weights.cuda())
            found = routed(*arguments)
            assert torch.equal(found, routed(*arguments))
            assert error(found[0], plain_experts(parts, chosen, weights, x.float(), codebook)) < limit
