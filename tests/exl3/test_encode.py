import itertools
from dataclasses import replace

import pytest
import torch
from conftest import random_hessian, random_weight
from reference_decoder import rotated_weight
from torch import Tensor

from keys35.errors import EncodeError
from keys35.exl3.codebook import codebook_table
from keys35.exl3.encode import EncodedLinear, EncodeOptions, LinearJob, encode_group
from keys35.exl3.linear import decode_weight
from keys35.exl3.tiles import WIDTHS, from_ring, unpack

OPTIONS = EncodeOptions(backend="cpu")


def encode(
    weight: Tensor, hessian: Tensor | None, bits: float = 4, options: EncodeOptions = OPTIONS, seed: int = 0
) -> EncodedLinear:
    job = LinearJob("w", weight, None if hessian is None else "h")
    return encode_group([job], {} if hessian is None else {"h": hessian}, [bits], options, seed)["w", bits]


def decoded(encoded: EncodedLinear) -> Tensor:
    return decode_weight(encoded.trellis, encoded.suh, encoded.svh)


def proxy_error(weight: Tensor, encoded: EncodedLinear, hessian: Tensor) -> float:
    """What the encoder claims to have reached, computed afresh in float64 from what it stores."""
    exact, hessian = weight.double(), hessian.double()
    error = exact - decoded(encoded)[: weight.shape[0], : weight.shape[1]].double()
    return ((error * (hessian @ error)).sum() / (exact * (hessian @ exact)).sum()).item()


def same_bytes(a: EncodedLinear, b: EncodedLinear) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.tensors("p").values(), b.tensors("p").values(), strict=True)
    )


def assert_well_formed(encoded: EncodedLinear, bits: float, k: int, n: int) -> None:
    assert (
        encoded.trellis.shape == (k // 16, n // 16, int(16 * bits)) and encoded.trellis.dtype == torch.int16
    )
    assert encoded.suh.shape == (k,) and encoded.svh.shape == (n,)
    assert encoded.suh.dtype == encoded.svh.dtype == torch.float16
    assert torch.isfinite(encoded.suh).all() and torch.isfinite(encoded.svh).all()
    assert encoded.trellis.is_contiguous()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_beats_the_published_encoder(golden: dict[str, Tensor], golden_hessian: Tensor, bits: int) -> None:
    weight, theirs = golden["weight_in_out"], golden[f"k{bits}.proxy_error"].item()
    encoded = encode(weight, golden_hessian, bits)
    assert_well_formed(encoded, bits, 256, 384)
    reached = proxy_error(weight, encoded, golden_hessian)
    assert reached == pytest.approx(encoded.proxy_error, rel=5e-3)
    assert reached < 0.75 * theirs
    assert not decoded(encoded)[:, -4:].any() and not encoded.svh[-4:].any()  # its last columns are zero


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_second_decoder_reads_the_same_bits(bits: float) -> None:
    weight, hessian = random_weight(128, 128), random_hessian(128)
    encoded = encode(weight, hessian, bits)
    assert_well_formed(encoded, bits, 128, 128)
    ours = from_ring(codebook_table()[unpack(encoded.trellis).long()]).half()
    assert torch.equal(torch.from_numpy(rotated_weight(encoded.trellis.numpy())), ours)
    assert proxy_error(weight, encoded, hessian) == pytest.approx(encoded.proxy_error, rel=0.01)
    assert encoded.proxy_error < 1.2 * 4.0**-bits


def test_feedback_and_refit_beat_plain_rounding() -> None:
    weight, hessian = random_weight(256, 128), random_hessian(256)
    plain = encode(weight, None, 3, EncodeOptions(backend="cpu", refit_rounds=0))
    without_refit = encode(weight, hessian, 3, EncodeOptions(backend="cpu", refit_rounds=0))
    full = encode(weight, hessian, 3)
    errors = [proxy_error(weight, encoded, hessian) for encoded in (full, without_refit, plain)]
    assert errors[0] <= errors[1] < 0.9 * errors[2]
    assert plain.fallback and not full.fallback


def test_company_changes_no_byte() -> None:
    hessians = {"x": random_hessian(128), "y": random_hessian(128, 1)}
    jobs = [
        LinearJob("gate", random_weight(128, 128), "x"),
        LinearJob("up", random_weight(128, 128, 1), "x"),
        LinearJob("other", random_weight(128, 128, 2), "y"),
        LinearJob("down", random_weight(256, 128, 3), None),
    ]
    together = encode_group(jobs, hessians, [5, 8.0], OPTIONS, 5)
    assert len(together) == 8
    cut = encode_group(jobs[::-1], hessians, [8], EncodeOptions(backend="cpu", stack_elements=1), 5)
    for job in jobs:
        alone = encode_group([job], hessians, [5], OPTIONS, 5)[job.name, 5]
        assert same_bytes(together[job.name, 5], alone)
        assert same_bytes(together[job.name, 8], cut[job.name, 8])


def test_seed_and_name_choose_the_signs() -> None:
    weight, hessian = random_weight(128, 128), random_hessian(128)
    first, again, other = (encode(weight, hessian, seed=seed) for seed in (1, 1, 2))
    assert same_bytes(first, again) and not same_bytes(first, other)
    jobs = [LinearJob(name, weight, "h") for name in ("a", "b")]
    named = encode_group(jobs, {"h": hessian}, [4], OPTIONS, 1)
    assert torch.equal(
        named["a", 4].suh.sign(), named["b", 4].suh.sign()
    )  # inputs are shared with the Hessian
    assert not torch.equal(named["a", 4].svh.sign(), named["b", 4].svh.sign())


def test_odd_sizes_are_padded_with_exact_zeros() -> None:
    weight, hessian = random_weight(130, 160), random_hessian(130)
    encoded = encode(weight, hessian)
    assert_well_formed(encoded, 4, 256, 256)
    assert not decoded(encoded)[130:].any() and not decoded(encoded)[:, 160:].any()
    assert encoded.svh[:160].all() and not encoded.svh[160:].any()
    assert proxy_error(weight, encoded, hessian) == pytest.approx(encoded.proxy_error, rel=1e-2)
    assert encoded.proxy_error < 0.005


def test_zero_rows_and_columns_stay_exactly_zero() -> None:
    weight = random_weight(128, 128)
    weight[5], weight[:, 7], weight[16:32, 32:48] = 0, 0, 0
    encoded = encode(weight, random_hessian(128))
    assert_well_formed(encoded, 4, 128, 128)
    values = decoded(encoded)
    assert not values[5].any() and not values[:, 7].any()
    assert values[16:32, 32:48].abs().max() < 0.1 * weight.abs().max()
    assert (encoded.svh == 0).sum() == 1


@pytest.mark.parametrize("with_hessian", [True, False])
def test_a_weight_of_zeros_decodes_to_zeros(with_hessian: bool) -> None:
    encoded = encode(torch.zeros(128, 128), random_hessian(128) if with_hessian else None)
    assert_well_formed(encoded, 4, 128, 128)
    assert not decoded(encoded).any()
    assert encoded.proxy_error == 0


@pytest.mark.parametrize("size", [1e-8, 1e-5, 1.0, 1e4, 1e6])
def test_small_and_large_weights_keep_their_precision(size: float) -> None:
    weight, hessian = random_weight(128, 128) / 0.02, random_hessian(128)
    encoded = encode(weight * size, hessian)
    assert_well_formed(encoded, 4, 128, 128)
    assert encoded.proxy_error == pytest.approx(encode(weight, hessian).proxy_error, rel=0.01)
    assert proxy_error(weight * size, encoded, hessian) == pytest.approx(encoded.proxy_error, rel=0.01)


def test_weights_below_fp16_become_zeros_and_say_so() -> None:
    encoded = encode(random_weight(128, 128) * 1e-20, random_hessian(128))
    assert_well_formed(encoded, 4, 128, 128)
    assert not decoded(encoded).any() and encoded.proxy_error == 1


def test_a_real_column_never_gets_a_scale_of_zero() -> None:
    weight = random_weight(128, 128)
    weight[:, 3] *= 1e-20
    encoded = encode(weight, random_hessian(128))
    assert encoded.svh.all()
    assert decoded(encoded)[:, 3].abs().max() < 1e-6 * weight.abs().max()


@pytest.mark.parametrize("hessian", ["nan", "zero"])
def test_a_useless_hessian_is_flagged(hessian: str) -> None:
    broken = random_hessian(128) * (float("nan") if hessian == "nan" else 0)
    encoded = encode(random_weight(128, 128), broken)
    assert encoded.fallback
    weight = random_weight(128, 128)
    assert ((decoded(encoded) - weight).norm() / weight.norm()).square() < 0.005


def test_a_refit_never_raises_the_error() -> None:
    weight, hessian = random_weight(256, 128), random_hessian(256)
    errors = [
        encode(weight, hessian, 2, EncodeOptions(backend="cpu", refit_rounds=r)).proxy_error
        for r in (0, 1, 3)
    ]
    assert all(later <= earlier for earlier, later in itertools.pairwise(errors))


def test_sweeps_lower_the_error() -> None:
    weight, hessian = random_weight(256, 128), random_hessian(256)
    plain = EncodeOptions(backend="cpu", refit_rounds=0, sigma_reg=0.001)
    errors = [encode(weight, hessian, 2, replace(plain, sweeps=n)).proxy_error for n in (0, 1, 3)]
    assert errors[1] < 0.999 * errors[0] and errors[2] < errors[1]


def test_sweeps_leave_a_weight_without_a_hessian_as_it_is() -> None:
    plain, swept = (encode(random_weight(128, 128), None, 3, EncodeOptions(backend="cpu", sweeps=n)) for n in (0, 1))
    assert same_bytes(plain, swept)


def test_bf16_weights_are_taken_as_they_are() -> None:
    weight, hessian = random_weight(128, 128).bfloat16(), random_hessian(128)
    assert same_bytes(encode(weight, hessian), encode(weight.float(), hessian))
    assert same_bytes(encode(weight.T.contiguous().T, hessian), encode(weight, hessian))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_refused_by_name(value: float) -> None:
    weight = random_weight(128, 128)
    weight[3, 4] = weight[9, 9] = value
    with pytest.raises(
        EncodeError, match=f"w: 2 of 16384 weights are not finite.*{value}.*input 3, output 4"
    ):
        encode(weight, None)


def test_impossible_requests_are_refused() -> None:
    weight = random_weight(128, 128)
    with pytest.raises(EncodeError, match="no width of 2.25"):
        encode(weight, None, 2.25)
    with pytest.raises(EncodeError, match=r"shape \(64, 64\), the weight has 128 inputs"):
        encode(weight, random_hessian(64))
    with pytest.raises(EncodeError, match="no Hessian 'absent'"):
        encode_group([LinearJob("w", weight, "absent")], {}, [3], OPTIONS, 0)
    with pytest.raises(EncodeError, match="largest weight"):
        encode(weight * 1e12, None)
    with pytest.raises(EncodeError, match=r"must be a matrix.*\(3,\)"):
        encode(torch.ones(3), None)
