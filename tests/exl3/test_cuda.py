"""The GPU encoder against the CPU one, and against itself: every test here needs a CUDA device."""

import pytest
import torch

from keys35.errors import EncodeError
from keys35.exl3.codebook import decode_states
from keys35.exl3.encode import EncodeOptions, LinearJob, encode_group
from keys35.exl3.gpu.launch import Limits
from keys35.exl3.hadamard import _rotate, rotate_both, rotate_in, rotate_out
from keys35.exl3.linear import decode_weight
from keys35.exl3.scale import best_scale
from keys35.exl3.tiles import WIDTHS, from_ring, pack, symbol_bits, unpack
from keys35.exl3.viterbi import get_backend
from keys35.exl3.viterbi.cuda import FAST_WIDTHS, Strips, plan_launch, scratch_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

INTEGERS = [float(bits) for bits in FAST_WIDTHS]


def gaussian(count: int, bits: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 256, generator=generator) * best_scale(bits)


def encode(tiles: torch.Tensor, bits: float, backend: str = "cuda") -> torch.Tensor:
    device = "cuda" if backend == "cuda" else "cpu"
    return get_backend(backend).encode_tiles(tiles.to(device), bits).cpu().view(torch.int16).int() & 0xFFFF


def error(tiles: torch.Tensor, states: torch.Tensor) -> float:
    return float((decode_states(states) - tiles).double().square().mean())


def closes(states: torch.Tensor, bits: float) -> bool:
    """Every state is its predecessor shifted by the new bits, around the ring."""
    new = torch.tensor(symbol_bits(bits))
    kept = (states.roll(1, 1) << new) & 0xFFFF
    return torch.equal(kept, states & ~((1 << new) - 1))


@pytest.mark.parametrize("bits", WIDTHS)
def test_rings_close_and_errors_match_the_cpu(bits: float) -> None:
    tiles = gaussian(96, bits)
    ours, reference = encode(tiles, bits), encode(tiles, bits, "cpu")
    assert closes(ours, bits)
    assert torch.equal(unpack(pack(ours, bits)), ours)
    assert error(tiles, ours) == pytest.approx(error(tiles, reference), rel=0.004)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_tile_does_not_notice_its_company(bits: float) -> None:
    tiles = gaussian(700, bits)
    whole = encode(tiles, bits)
    assert torch.equal(encode(tiles, bits), whole)
    for start, count in ((0, 0), (3, 1), (5, 2), (11, 3), (2, 131), (7, 133), (1, 397)):
        part = encode(tiles[start : start + count], bits)
        assert torch.equal(part, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("bits", WIDTHS)
def test_extreme_tiles(bits: float) -> None:
    rows = [torch.zeros(256), torch.full((256,), 1e-20), torch.full((256,), -3.0), torch.full((256,), 1e4)]
    rows += [gaussian(1, bits)[0] * 1e-20, gaussian(1, bits)[0] * 1e4, torch.full((256,), -1e4)]
    tiles = torch.stack(rows)
    ours, reference = encode(tiles, bits), encode(tiles, bits, "cpu")
    assert closes(ours, bits)
    wrong = (decode_states(ours) - tiles).double().square().mean(1)
    least = (decode_states(reference) - tiles).double().square().mean(1)
    assert torch.all(wrong <= least * 1.02 + 2e-4), (wrong, least)


@pytest.mark.parametrize("bits", [2.0, 3.0, 4.0, 2.5])
def test_strips_are_read_and_written_in_place(bits: float) -> None:
    strips = gaussian(3 * 5, bits).view(3, 16, 80).cuda()
    order = from_ring(torch.arange(256).view(1, 1, 256)).flatten().argsort().cuda()
    tiles = strips.view(3, 16, 5, 16).transpose(1, 2).reshape(15, 256)[:, order].contiguous()
    wanted = get_backend("cuda").encode_tiles(tiles, bits)
    values, states = strips.clone(), torch.zeros(15, 256, dtype=torch.uint16, device="cuda")
    get_backend("cuda").search(values, values, states, 15, bits, Strips(5, 80, 16 * 80, 5 * 256))
    assert torch.equal(states.view(torch.int16), wanted.view(torch.int16))
    decoded = decode_states(wanted.view(torch.int16).view(3, 1, 5, 256).int())
    assert torch.equal(values, from_ring(decoded))


def test_the_scratch_is_bounded() -> None:
    for bits in WIDTHS:
        assert scratch_bytes(bits, 0) == 0
        assert scratch_bytes(bits, 10**7) == scratch_bytes(bits, 10**9) < 5 << 30


def test_small_gpus_get_fewer_tiles_or_the_general_kernel() -> None:
    small = Limits("sm_86", 28, 99 * 1024)
    assert plan_launch(10**6, 2.0, small).group == 1
    assert plan_launch(10**6, 5.0, small).group > 1
    tiny = Limits("sm_80", 28, 48 * 1024)
    assert plan_launch(10**6, 2.0, tiny).source == "viterbi_any.cu"


def test_the_general_kernel_agrees_where_both_can(monkeypatch) -> None:
    from keys35.exl3.viterbi import cuda

    for bits in (4.0, 5.0, 8.0):
        tiles = gaussian(40, bits)
        fast = encode(tiles, bits)
        monkeypatch.setattr(cuda, "FAST_WIDTHS", ())
        assert torch.equal(encode(tiles, bits), fast)
        monkeypatch.undo()


def test_rotations_make_the_same_bits_as_the_cpu() -> None:
    weight = torch.randn(3, 256, 384)
    for kernel, reference in (
        (rotate_in, _rotate(weight, 1)),
        (rotate_out, _rotate(weight, 2)),
        (rotate_both, _rotate(_rotate(weight, 1), 2)),
    ):
        assert torch.equal(kernel(weight.cuda()).cpu(), reference)


@pytest.mark.parametrize("bits", WIDTHS)
def test_decoding_makes_the_same_bits_as_the_cpu(bits: float) -> None:
    trellis = pack(encode(gaussian(16 * 24, bits), bits), bits).view(16, 24, -1)
    suh, svh = torch.randn(256).half(), torch.randn(384).half()
    wanted = decode_weight(trellis, suh, svh)
    assert torch.equal(decode_weight(trellis.cuda(), suh.cuda(), svh.cuda()).cpu(), wanted)
    for dtype in (torch.float16, torch.bfloat16):
        found = decode_weight(trellis.cuda(), suh.cuda(), svh.cuda(), dtype=dtype)
        assert torch.equal(found.cpu(), wanted.to(dtype))


@pytest.mark.parametrize("bits", [2.0, 3.0, 4.0, 2.5])
def test_encode_group_matches_the_cpu_and_repeats_itself(bits: float) -> None:
    generator = torch.Generator().manual_seed(1)
    jobs = [LinearJob(f"w{i}", torch.randn(384, 250, generator=generator) * 0.02, "h") for i in range(2)]
    x = torch.randn(1000, 384, generator=generator) * torch.exp(0.5 * torch.randn(384, generator=generator))
    hessians = {"h": x.T @ x / 1000}
    runs = [encode_group(jobs, hessians, [bits], EncodeOptions(backend=name), 0) for name in ("cuda", "cuda", "cpu")]
    for job in jobs:
        first, second, cpu = (run[job.name, bits] for run in runs)
        assert first.trellis.device == job.weight.device
        assert first.trellis.shape == cpu.trellis.shape
        for part in ("trellis", "suh", "svh"):
            assert torch.equal(getattr(first, part), getattr(second, part))
        assert first.proxy_error == pytest.approx(cpu.proxy_error, rel=0.005)


def test_tiles_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(EncodeError, match="256"):
        get_backend("cuda").encode_tiles(torch.zeros(2, 255, device="cuda"), 3)


def test_tiles_may_come_from_the_host() -> None:
    tiles = gaussian(5, 3)
    found = get_backend("cuda").encode_tiles(tiles, 3)
    assert found.device == tiles.device
    assert torch.equal(found.view(torch.int16).int() & 0xFFFF, encode(tiles, 3))
