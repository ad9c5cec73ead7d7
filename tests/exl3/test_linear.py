import numpy as np
import pytest
import torch
from reference_decoder import decode
from torch import Tensor

from keys35.exl3.codebook import CODEBOOKS
from keys35.exl3.linear import EncodedLinear, bits_of, decode_weight

GOLDEN_WIDTHS = [2, 3, 4, 5, 8]


@pytest.mark.parametrize("bits", GOLDEN_WIDTHS)
def test_golden_tensors_decode_to_their_reconstruction(golden: dict[str, Tensor], bits: int) -> None:
    parts = [golden[f"k{bits}.{name}"] for name in ("trellis", "suh", "svh")]
    assert bits_of(parts[0].shape) == bits
    torch.testing.assert_close(
        decode_weight(*parts), golden[f"k{bits}.reconstructed_float32"], atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("bits", GOLDEN_WIDTHS)
def test_golden_proxy_errors_come_out_again(
    golden: dict[str, Tensor], golden_hessian: Tensor, bits: int
) -> None:
    weight, hessian = golden["weight_in_out"].double(), golden_hessian.double()
    error = (
        weight - decode_weight(*(golden[f"k{bits}.{name}"] for name in ("trellis", "suh", "svh"))).double()
    )
    ratio = (error * (hessian @ error)).sum() / (weight * (hessian @ weight)).sum()
    assert ratio.item() == pytest.approx(
        golden[f"k{bits}.proxy_error"].item(), rel=0.01 if bits == 8 else 2e-4
    )


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", [1, 1.5, 3, 3.5, 7])
def test_a_second_decoder_agrees(bits: float, codebook: str) -> None:
    random = np.random.default_rng(int(10 * bits))
    trellis = random.integers(-(2**15), 2**15, (8, 8, int(16 * bits)), dtype=np.int16)
    suh, svh = (random.normal(size=128).astype(np.float16) for _ in range(2))
    ours = decode_weight(*(torch.from_numpy(a) for a in (trellis, suh, svh)), codebook)
    np.testing.assert_allclose(ours, decode(trellis, suh, svh, codebook), rtol=0, atol=3e-5)


def test_stored_tensors_carry_one_marker() -> None:
    parts = torch.zeros(8, 8, 48, dtype=torch.int16), torch.zeros(128).half(), torch.zeros(128).half()
    for codebook, marker in (("mul1", {"p.mul1"}), ("mcg", {"p.mcg"}), ("3inst", set())):
        stored = EncodedLinear(*parts, bits=3, proxy_error=0.0, fallback=False, codebook=codebook).tensors(
            "p"
        )
        assert set(stored) == {"p.trellis", "p.suh", "p.svh"} | marker
