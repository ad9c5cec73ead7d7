"""The real-size layer's benchmark in small: it goes all the way through, and a piece that was cut off is resumed."""

import json
from pathlib import Path

import pytest

from keys35.bench import real_layer
from keys35.stages import workers

SMALL = ["--experts", "8", "--hidden", "128", "--intermediate", "128", "--heads", "1", "--window", "64",
         "--fit", "8", "--selection", "4", "--group", "4"]  # fmt: skip


@pytest.mark.slow
def test_a_slice_goes_through_every_stage_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(tmp_path / "slice"), *SMALL, "--out", str(tmp_path / "out.json")]
    with monkeypatch.context() as patch:
        encode, units = workers.encode_experts, []

        def cut_off(job, unit, *rest) -> None:
            if units:
                raise KeyboardInterrupt
            units.append(unit)
            encode(job, unit, *rest)

        patch.setattr(workers, "encode_experts", cut_off)
        with pytest.raises(KeyboardInterrupt):
            real_layer.main(arguments)
    real_layer.main(arguments)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["interruptions"] == 1 and found["check"]["mean"] == "11/4"
    assert [f.split(":")[0] for f in found["check"]["findings"]] == ["tp-cut"], "a slice this small is for one rank"
    assert all(seconds > 0 for seconds in found["seconds"].values()), found["seconds"]
    assert sum(found["seconds"].values()) < found["with_assembly_and_check_seconds"]
    errors = found["proxy_error"]
    assert errors["2"] > 2 * errors["3"] > 4 * errors["4"] > 0


@pytest.mark.slow
def test_a_predicted_measurement_goes_through_too(tmp_path: Path) -> None:
    options = ["--predicted", "--prefix", "quantized", "--out", str(tmp_path / "out.json")]
    real_layer.main([str(tmp_path / "slice"), *SMALL, *options])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["measure"] == "predicted" and found["check"]["mean"] == "11/4" and found["seconds"]["simulation"] > 0
    assert found["prefix"] == "quantized" and "projection" not in found
    assert all(error > 0 for error in found["proxy_error"].values())
