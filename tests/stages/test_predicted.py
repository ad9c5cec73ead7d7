"""A predicted measurement: all simulated, a sample encoded, and in the end the same encodings as a full one's."""

import numpy as np
import pytest
import torch
from rich.console import Console
from small import digest
from tiny import tiny_recipe

from keys35.calibration.statistics import SHARED_INPUT, MoeRows
from keys35.errors import ResumeError
from keys35.files.atomic import load_tensors
from keys35.progress import Progress
from keys35.report.terminal import show_allocation
from keys35.stages.allocate import allocate, load_allocation
from keys35.stages.candidates import Candidates, are_held
from keys35.stages.capture import _kept_rows, calibration_windows, capture, hessian_file, layer_rows
from keys35.stages.costs import POOL, _completed, _ratios, read_measured
from keys35.stages.explain import explain, sentences
from keys35.stages.job import open_job, resume_job
from keys35.stages.measure import measure
from keys35.stages.pieces import Pieces
from keys35.stages.quantize import quantize

USUAL = np.array([1.0, 0.25])


def test_a_sample_is_encoded_and_everything_in_the_end(tmp_path, tiny):
    experts = {"widths": [3, 4], "bits": 3.25, "group": 1, "measure": "predicted", "sample": 4}
    with open_job(tiny.source, tiny_recipe(experts=experts), tmp_path / "work") as job:
        measure(job, Progress())
        receipts = [job.work.require(f"experts/layer-001/{first:04d}")["data"] for first in range(4)]
        assert [data["error"][0] is not None for data in receipts] == [False, True, False, False]
        result = allocate(job)
        assert result["predicted"]["experts"] == 1  # one of each MoE layer, and no held-out token chose the other
        told = [sentences(explain(job, 1, expert))[2] for expert in (2, 1)]
        assert "predicted from a simulated encoding" in told[0] and "error known to" in told[1]
        quantize(job, Progress())
        chosen = load_allocation(job)
        assert are_held(job, chosen)
        with resume_job(tiny.work) as full:
            for ours, theirs in zip(read_measured(job).energy, read_measured(full).energy, strict=True):
                assert np.array_equal(ours, theirs)
            for layer, widths in chosen.items():
                pairs = Candidates(job, layer), Candidates(full, layer)
                for expert, width in enumerate(widths):
                    ours, theirs = (one.encoded(expert, "down_proj", width) for one in pairs)
                    assert all(torch.equal(ours[part], theirs[part]) for part in theirs)


def test_a_group_that_was_lost_is_measured_and_encoded_as_chosen(tmp_path, tiny):
    """As a kill leaves it between a group's rewritten file and its receipt; its measurement alone encodes a sample."""
    experts = {"widths": [3, 4], "bits": 3.25, "group": 2, "measure": "predicted", "sample": 4}
    with open_job(tiny.source, tiny_recipe(experts=experts), tmp_path / "work") as job:
        measure(job, Progress())
        allocate(job)
        chosen, folder = load_allocation(job), job.work.path("experts", "layer-001")
        rule = job.rules["model.layers.1.mlp.experts.0.up_proj.weight"]
        with pytest.raises(ResumeError, match="experts/layer-001/0000 has no model.*0.up_proj.*keys35 quantize"):
            list(Pieces(job, chosen).specs(rule))  # `assemble` before `quantize`: expert 1 alone is in that file
        quantize(job, Progress())
        wanted = digest(folder)
        for path in folder.glob("0000-k*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
        quantize(job, Progress())
        assert are_held(job, chosen) and digest(folder) == wanted


def test_what_is_not_known_is_simulated_times_what_the_known_come_to():
    simulated = np.array([[1.0, 2.0], [4.0, 4.0], [2.0, 1.0]])
    known = [[[0.5, 1.0], [0.1, 0.2]], None, [[1.0, 0.5], [0.2, 0.1]]]
    [ratios] = _ratios([known], [simulated], USUAL)
    assert np.allclose(ratios, [0.5, 0.1])
    found = _completed(known, simulated, ratios)
    assert found[0].tolist() == known[0] and found[2].tolist() == known[2]
    assert np.allclose(found[1], [[2.0, 2.0], [0.4, 0.4]])


def test_a_layer_with_few_encoded_experts_leans_on_the_others():
    simulated = np.ones((20, 1))
    few, many = _ratios([[[[0.9]], *[None] * 19], [[[0.1]]] * 20], [simulated, simulated], USUAL[:1])
    assert np.allclose(few, (0.9 + POOL * 0.5) / (1 + POOL))
    assert np.allclose(many, (20 * 0.1 + POOL * 0.5) / (20 + POOL))


def test_an_encoded_expert_that_no_held_out_token_chose_says_nothing():
    """It came to a ratio of 0, and its layer to 0.4 of what the other layer was known to have, its own to 0.6."""
    reached, silent = [[[0.5], [0.1]], None], [[[0.0], [0.0]], None]
    drawn = [np.array([[1.0], [2.0]]), np.array([[0.0], [3.0]])]
    assert np.allclose(_ratios([reached, silent], drawn, USUAL), [[0.5, 0.1]] * 2)
    assert np.allclose(_ratios([silent, silent], [drawn[1]] * 2, USUAL), [USUAL] * 2)


def test_what_was_compared_is_what_held_out_tokens_chose(tmp_path, tiny):
    """Of this model's two encoded experts one is chosen: that is nothing to tell a correlation from."""
    experts = {"widths": [3, 4], "bits": 3.25, "group": 4, "measure": "predicted"}
    with open_job(tiny.source, tiny_recipe(experts=experts), tmp_path / "work") as job:
        measure(job, Progress())
        rows = [job.work.require(f"experts/layer-{layer:03d}/0000")["data"]["selection_rows"] for layer in (1, 2)]
        assert (rows[0][1] > 0, rows[1][2] > 0) == (True, False)
        result = allocate(job)
        assert result["predicted"] == {"experts": 1, "rank_correlation": None, "apart": None}
        costs = read_measured(job).plain_errors()
        assert [np.count_nonzero(layer[:, 0]) for layer in costs] == [np.count_nonzero(row) for row in rows]
    console = Console(record=True, width=200)
    show_allocation(console, result)
    assert "chose 1 expert of those that were encoded, too few to compare with" in console.export_text()


def test_some_fit_windows_are_enough_to_predict_from(tmp_path, tiny):
    """Where everything is encoded again behind the prefix, on all of them: less is kept, what it says of rows stays."""
    experts = {"widths": [3, 4], "bits": 3.25, "group": 2, "measure": "predicted", "sample": 4}
    found = {}
    for few in (0, 2):
        calibration = tiny_recipe().calibration.model_dump() | {"simulation_windows": few}
        recipe = tiny_recipe(experts=experts, calibration=calibration, encoder={"prefix": "quantized"})
        with open_job(tiny.source, recipe, tmp_path / f"work-{few}") as job:
            measure(job, Progress())
            windows = calibration_windows(job)
            capture(job, job.store, 1, windows)()
            kept, held = layer_rows(job, 1, windows).fit, load_tensors(hessian_file(job, 1))
            units = [job.work.require(f"experts/layer-001/{first:04d}")["data"] for first in (0, 2)]
            found[few] = kept, [unit["fit_rows"] for unit in units], [unit["simulated"] for unit in units]
            assert list(held) == [f"hessian.{SHARED_INPUT}"], "dense linears get Hessians behind the prefix"
            allocate(job)
            quantize(job, Progress())
            assert job.work.require("final/layer-001/0000")["data"]["fit_rows"]
    (whole, rows, costs), (part, rows_again, other_costs) = found.values()
    assert len(whole.x) == 6 * 48 and rows == rows_again and costs != other_costs
    picked = torch.cat([torch.arange(48), 3 * 48 + torch.arange(48)])
    assert torch.equal(part.x, whole.x[picked]) and torch.equal(part.weights, whole.weights[picked])


def test_no_fit_window_counts_twice_where_fewer_are_left_than_are_wanted(tmp_path, tiny):
    """Windows that a layer breaks are dropped."""
    experts = {"widths": [3, 4], "bits": 3.25, "group": 2, "measure": "predicted", "sample": 4}
    calibration = tiny_recipe().calibration.model_dump() | {"simulation_windows": 5}
    recipe = tiny_recipe(experts=experts, calibration=calibration, encoder={"prefix": "quantized"})
    numbers = torch.arange(4 * 48.0)  # of six windows
    rows = MoeRows(numbers[:, None], torch.zeros(len(numbers), 1, dtype=torch.int64), torch.ones(len(numbers), 1))
    with open_job(tiny.source, recipe, tmp_path / "work") as job:
        kept = _kept_rows(job, {"fit": rows, "selection": rows}, 48)
    assert torch.equal(MoeRows.from_tensors(kept, "fit").x[:, 0], numbers)
