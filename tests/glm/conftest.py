import pytest
import torch
from builders_exl3 import DEMO, demo_config, demo_windows

from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.weights import WeightStore

torch.set_num_threads(1)  # many small products: threads would only wait for each other


@pytest.fixture(scope="session", name="demo_config")
def demo_config_fixture() -> GlmConfig:
    return demo_config()


@pytest.fixture(scope="session")
def demo_store(demo_config: GlmConfig) -> WeightStore:
    return WeightStore(ShardedSource.open(DEMO / "model"), demo_config)


@pytest.fixture(scope="session")
def prose() -> list[torch.Tensor]:
    return demo_windows("eval-prose.txt", 16, 512)
