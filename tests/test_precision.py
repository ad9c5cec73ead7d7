"""Factors against the library's; that threads do not matter is shown in tests/calibration/test_threads.py."""

import os
import subprocess
import sys

import pytest
import torch

from keys35.precision import BLOCK, cholesky, short_products, vector_sum, whole_products


@pytest.mark.parametrize("size", [1, BLOCK, 2 * BLOCK + 40])
def test_a_factor_is_the_librarys_to_rounding(size):
    rows = torch.randn(2, 3 * size, size, generator=torch.Generator().manual_seed(size))
    systems = rows.mT @ rows / len(rows[0])
    kept, (lower, failed) = systems.clone(), cholesky(systems)
    assert not failed.any() and torch.equal(lower, lower.tril()) and torch.equal(systems, kept)
    assert torch.allclose(lower.double(), torch.linalg.cholesky(systems.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
@pytest.mark.parametrize("place", [0, BLOCK + 1])
def test_what_has_no_factor_says_so_beside_what_has(bad, place):
    systems = torch.eye(2 * BLOCK).repeat(2, 1, 1)
    systems[1, place, place] = bad
    lower, failed = cholesky(systems)
    assert int(failed[0]) == 0 != int(failed[1]) and torch.equal(lower[0], torch.eye(2 * BLOCK))


def test_a_sum_of_many():
    values = torch.rand(100_003, generator=torch.Generator().manual_seed(1))
    assert float(vector_sum(values)) == pytest.approx(float(values.double().sum()), rel=1e-6)
    assert float(vector_sum(values[:0])) == 0


def test_precision_is_put_back_whatever_happens():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError), short_products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
        with whole_products():
            assert torch.get_float32_matmul_precision() == "highest"
            raise RuntimeError
    assert torch.get_float32_matmul_precision() == before
    with short_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_an_environment_that_shortens_products_does_not():
    code = "import torch; before = torch.get_float32_matmul_precision(); import keys35.exl3.encode; " \
           "print(before, torch.get_float32_matmul_precision())"
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["high", "highest"], done.stderr
