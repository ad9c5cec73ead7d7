from pathlib import Path

from keys35.exl3.bench import report


def test_the_report_has_a_row_per_width(tmp_path: Path) -> None:
    lines = report("cpu", 16, (5.0, 8.0), tmp_path / "absent").splitlines()
    assert [line.split()[0] for line in lines] == ["backend", "bits", "5", "8"]
    for line in lines[2:]:
        _, milliseconds, _, error, over_limit = line.split()
        assert float(milliseconds) > 0
        assert 0 < float(error) < 0.002 and 1 < float(over_limit) < 1.5
