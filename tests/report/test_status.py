"""Where a work directory stands, read from names and small files alone."""

from pathlib import Path

from keys35.files.atomic import write_json
from keys35.files.ledger import WHEREABOUTS, Workdir
from keys35.report.status import read_status


def test_a_last_group_may_be_smaller(tmp_path: Path) -> None:
    """Ten experts in groups of eight are ten, not sixteen; an MTP layer's are not among those that are measured."""
    work = Workdir.open(tmp_path, {"tool": "0", "recipe": {"name": "some", "experts": {"group": 8}}})
    facts = {"layers": 3, "experts": 20, "experts_a_layer": 10, "mtp_layers": [2]}
    write_json(work.path(WHEREABOUTS), facts)
    for unit in ("layer-000/0000", "layer-000/0008", "layer-001/0008", "layer-002/0000"):
        work.commit(f"experts/{unit}", [], {})
    assert read_status(tmp_path).experts == (12, 20)
