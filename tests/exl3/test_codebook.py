import pytest
import torch

from keys35.exl3.codebook import CODEBOOKS, MARKERS, codebook_table, decode_states, marker_tensor

STATES = [0, 1, 2, 255, 12345, 32768, 65535]
PUBLISHED = {
    "3inst": "3a25 bb5b 3b74 3cd1 3c59 b7f8 b110",
    "mcg": "3f60 304e ba13 bd26 b682 b915 3acd",
    "mul1": "c2e8 3921 b72d 3ab3 bda3 baf2 b936",
}
STATISTICS = {
    "3inst": (1.243711, 3.973, 10598),
    "mcg": (1.244112, 3.949, 10746),
    "mul1": (1.000312, 3.453, 913),
}


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_published_values(codebook: str) -> None:
    halves = decode_states(torch.tensor(STATES), codebook).half().view(torch.int16).tolist()
    assert " ".join(f"{h & 0xFFFF:04x}" for h in halves) == PUBLISHED[codebook]


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_published_statistics(codebook: str) -> None:
    table = codebook_table(codebook).double()
    rms, largest, distinct = STATISTICS[codebook]
    assert table.square().mean().sqrt().item() == pytest.approx(rms, abs=1e-6)
    assert table.abs().max().item() == pytest.approx(largest, abs=1e-3)
    assert table.unique().numel() == distinct


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_values_are_exact_in_fp16(codebook: str) -> None:
    table = codebook_table(codebook)
    assert torch.equal(table.half().float(), table)


def test_int16_states_are_unsigned() -> None:
    states = torch.tensor([32768, 65535])
    assert torch.equal(decode_states(states.to(torch.int16)), decode_states(states))


def test_markers_are_the_published_words() -> None:
    assert marker_tensor("mul1").item() == -2082680531
    assert marker_tensor("mcg").item() == -877912083
    assert marker_tensor("mul1").shape == () and marker_tensor("mul1").dtype == torch.int32
    assert set(MARKERS) == {"mul1", "mcg"}


def test_unknown_codebook_is_refused() -> None:
    with pytest.raises(ValueError, match="4inst.*mul1, mcg, 3inst"):
        decode_states(torch.tensor([0]), "4inst")
