import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_decoder import element, tile_states

from keys35.errors import EncodeError
from keys35.exl3.tiles import RING, WIDTHS, bits_of, from_ring, pack, symbol_bits, to_ring, unpack

VECTORS = {
    2: ("6c6c6c6c 6c6c6c6c 6c6c6c6c", "b1b1 c6c6 1b1b c6c6 6c6c"),
    2.5: ("7615c761 5c7615c7 615c7615", "8571 2b8e ae3b 3b0a 615c"),
    3: ("398abc39 8abc398a bc398abc", "55e1 af0e 7873 e62a 8abc"),
    4: ("16b05af4 9e38d27c 16b05af4", "27c1 7c16 c16b b05a d27c"),
}


def states_of(symbols: list[int], bits: float) -> torch.Tensor:
    """States of a ring of symbols: run around it twice, and the start no longer matters."""
    state, states = 0, []
    for _ in range(2):
        states = []
        for symbol, new in zip(symbols, symbol_bits(bits), strict=True):
            state = (state << new | symbol) & 0xFFFF
            states.append(state)
    return torch.tensor(states)


@pytest.mark.parametrize("bits", VECTORS)
def test_published_vectors(bits: float) -> None:
    states = states_of([(5 * p + 1) % (1 << d) for p, d in enumerate(symbol_bits(bits))], bits)
    words, published_states = VECTORS[bits]
    trellis = pack(states, bits)
    assert " ".join(f"{w:08x}" for w in trellis.numpy().view("<u4")[:3]) == words
    assert " ".join(f"{states[p]:04x}" for p in (0, 1, 2, 5, 255)) == published_states
    assert torch.equal(unpack(trellis).long(), states)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(WIDTHS), st.randoms(use_true_random=False))
def test_packing_round_trips(bits: float, random) -> None:
    symbols = [[random.randrange(1 << d) for d in symbol_bits(bits)] for _ in range(2)]
    states = torch.stack([states_of(row, bits) for row in symbols])
    trellis = pack(states, bits)
    assert trellis.dtype == torch.int16 and trellis.shape == (2, int(16 * bits)) and trellis.is_contiguous()
    assert bits_of(trellis.shape) == bits
    assert torch.equal(unpack(trellis).long(), states)
    assert tile_states(trellis[0].numpy(), bits) == states[0].tolist()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(WIDTHS), st.integers(0, 2**32 - 1))
def test_every_word_pattern_is_a_trellis(bits: float, seed: int) -> None:
    words = np.random.default_rng(seed).integers(-(2**15), 2**15, (3, int(16 * bits)), dtype=np.int16)
    trellis = torch.from_numpy(words)
    assert torch.equal(pack(unpack(trellis), bits), trellis)


def test_tile_order_is_the_published_one() -> None:
    weight = torch.arange(32 * 48.0).view(32, 48)
    tiles = to_ring(weight)
    assert tiles.shape == (2, 3, RING)
    for p in range(RING):
        row, column = element(p)
        assert tiles[1, 2, p] == weight[16 + row, 32 + column]
    assert torch.equal(from_ring(tiles), weight)


def test_tiles_keep_leading_dimensions() -> None:
    weight = torch.randn(3, 16, 32)
    assert torch.equal(to_ring(weight)[2], to_ring(weight[2]))
    assert torch.equal(from_ring(to_ring(weight)), weight)


@pytest.mark.parametrize("bits", [0, 2.25, 4.5, 9, 16])
def test_a_width_that_does_not_exist_is_refused(bits: float) -> None:
    with pytest.raises(EncodeError, match="no width"):
        symbol_bits(bits)
