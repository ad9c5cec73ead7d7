"""Copies between a GPU and the host: of any type and shape, and in a thread beside other work."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from keys35 import host

DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 3), (1,), (7, 5), (600, 1024)])
def test_what_is_on_the_host_is_what_was_elsewhere(device, shape, monkeypatch) -> None:
    monkeypatch.setattr(host, "PIECE_BYTES", 1 << 19)  # the largest takes five pieces
    value = torch.randn(shape, device=device)
    found = host.on_host(value)
    assert found.device.type == "cpu" and torch.equal(found, value.cpu())
    rounded = torch.empty(shape, dtype=torch.bfloat16)
    host.fill(rounded, value)
    assert torch.equal(rounded, value.cpu().bfloat16())
    there = torch.empty(shape, dtype=torch.bfloat16, device=device)
    host.fill(there, value)
    assert torch.equal(there.cpu(), rounded)


@pytest.mark.parametrize("device", DEVICES)
def test_a_thread_copies_what_was_asked_for_before_it(device) -> None:
    """What the device has still to compute, too, and nothing that it is asked for later."""
    value = torch.zeros(1 << 12, 1 << 10, device=device)
    square = torch.eye(1 << 10, device=device)
    for _ in range(20):
        value = value @ square + 1
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(host.on_host, value).result()
    assert bool((found == 20).all())
