"""What `auto` does with a GPU that our kernels do not support, played on a machine without one."""

from types import SimpleNamespace

import pytest
import torch

from keys35.errors import EncodeError
from keys35.exl3.gpu.launch import Limits
from keys35.exl3.viterbi import get_backend


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch):
    properties = SimpleNamespace(name="Old GPU", major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("keys35.exl3.viterbi.peer.quantizer", lambda: (_ for _ in ()).throw(ImportError("none here")))
    get_backend.cache_clear()
    Limits.of.cache_clear()
    yield
    get_backend.cache_clear()
    Limits.of.cache_clear()


def test_our_backend_says_why_it_cannot_run(old_gpu: None) -> None:
    with pytest.raises(EncodeError, match=r"Old GPU has compute capability 7\.5.*8\.0"):
        get_backend("cuda")


def test_auto_falls_back_to_the_cpu_and_says_so(old_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    assert get_backend("auto").name == "cpu"
    assert "7.5" in caplog.text and "none here" in caplog.text
