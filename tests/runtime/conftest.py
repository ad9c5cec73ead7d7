import pytest
import torch
from builders_exl3 import DEMO, demo_config, demo_windows, rounded_checkpoint

from keys35.files.source import ShardedSource
from keys35.glm.weights import WeightStore
from keys35.runtime.panel import Panel
from keys35.runtime.reference import make_reference

torch.set_num_threads(1)  # many small products: threads would only wait for each other


@pytest.fixture(scope="session")
def panel():
    windows = [*demo_windows("eval-prose.txt", 2, 256), *demo_windows("eval-code.txt", 2, 200)]
    return Panel.of("test", windows, ["prose", "prose", "code", "code"])


@pytest.fixture(scope="session")
def source_store():
    return WeightStore(ShardedSource.open(DEMO / "model"), demo_config())


@pytest.fixture(scope="session")
def reference(tmp_path_factory, panel, source_store):
    return make_reference(source_store, panel, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def packed(tmp_path_factory, source_store):
    """The demo model with 8-bit EXL3 linears."""
    return rounded_checkpoint(tmp_path_factory.mktemp("packed"), source_store.source, demo_config())
