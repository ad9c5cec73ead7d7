from pathlib import Path

import pytest
from made_up import write_out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A checkpoint's made-up report files."""
    return write_out(tmp_path / "out")
