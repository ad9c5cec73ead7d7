import os
import subprocess
import sys

import numba
import numpy as np
import pytest
import torch
from reference_viterbi import TABLE, encode
from torch import Tensor

from keys35.errors import EncodeError
from keys35.exl3.codebook import codebook_table
from keys35.exl3.scale import best_scale
from keys35.exl3.tiles import RING, WIDTHS, pack, unpack
from keys35.exl3.viterbi import get_backend

BACKEND = get_backend("cpu")
# at most this share of a Gaussian tile's energy may be lost
NMSE = {2: 0.0695, 3: 0.0178, 4: 0.00455, 5: 0.00117}


def gaussian_tiles(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, RING, generator=torch.Generator().manual_seed(seed))


def squared_error(tiles: Tensor, states: Tensor) -> Tensor:
    return (codebook_table()[states.long()] - tiles).double().square().sum(-1)


@pytest.mark.parametrize("bits", WIDTHS)
def test_finds_the_path_of_an_independent_search(bits: float) -> None:
    tiles = gaussian_tiles(1) * best_scale(bits)
    found = BACKEND.encode_tiles(tiles, bits)[0].long().numpy()
    expected = np.array(encode(tiles[0].double().numpy(), bits))
    cost, best = (((TABLE[s] - tiles[0].double().numpy()) ** 2).sum() for s in (found, expected))
    assert cost == pytest.approx(best, rel=1e-6)
    assert (found == expected).mean() > 0.95  # float32 may break a near tie the other way


@pytest.mark.parametrize("bits", WIDTHS)
def test_states_close_the_ring(bits: float) -> None:
    states = BACKEND.encode_tiles(gaussian_tiles(17 if bits > 2 else 2), bits)
    assert states.dtype == torch.uint16
    assert torch.equal(unpack(pack(states, bits)), states.int())


@pytest.mark.parametrize("bits", NMSE)
def test_gaussian_tiles_lose_no_more_than_the_best_encoders(bits: int) -> None:
    tiles = gaussian_tiles(160, seed=1)
    scale = best_scale(bits)
    error = squared_error(tiles * scale, BACKEND.encode_tiles(tiles * scale, bits)).sum() / scale**2
    assert error / tiles.double().square().sum() <= NMSE[bits]


@pytest.mark.parametrize("bits", [2, 2.5, 4, 8])
def test_a_tile_does_not_depend_on_its_company(bits: float) -> None:
    tiles = gaussian_tiles(19)
    together = BACKEND.encode_tiles(tiles, bits)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(2))
    assert torch.equal(BACKEND.encode_tiles(tiles[order], bits).int(), together.int()[order])
    assert torch.equal(BACKEND.encode_tiles(tiles[18:].clone(), bits).int(), together[18:].int())


def test_threads_change_nothing() -> None:
    tiles, before = gaussian_tiles(40), numba.get_num_threads()
    try:
        results = []
        for threads in {1, before}:
            numba.set_num_threads(threads)
            results.append(BACKEND.encode_tiles(tiles, 3))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_another_processor_finds_the_same_states(tmp_path) -> None:
    """The same kernel compiled for 256-bit vectors, whatever this machine has."""
    tiles = gaussian_tiles(16)
    torch.save(tiles, tmp_path / "tiles.pt")
    script = (
        "import torch, sys; from keys35.exl3.viterbi import get_backend; "
        "tiles = torch.load(sys.argv[1] + '/tiles.pt'); "
        "torch.save(get_backend('cpu').encode_tiles(tiles, 3), sys.argv[1] + '/states.pt')"
    )
    settings = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=os.environ | settings, check=True)
    assert torch.equal(torch.load(tmp_path / "states.pt"), BACKEND.encode_tiles(tiles, 3))


def test_silence_and_noise_stay_finite() -> None:
    for tiles in (torch.zeros(2, RING), torch.full((2, RING), 1e4), torch.full((2, RING), -1e-30)):
        states = BACKEND.encode_tiles(tiles, 4)
        assert torch.equal(unpack(pack(states, 4)), states.int())


def test_no_tiles_make_no_states() -> None:
    assert BACKEND.encode_tiles(torch.empty(0, RING), 2).shape == (0, RING)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(EncodeError, match="abacus.*auto, cpu, cuda, exllamav3"):
        get_backend("abacus")
