"""What the two streams of a quantized prefix tell a layer's linears of each other."""

import pytest
import torch
from tiny import tiny_recipe

from keys35.files.ledger import Workdir
from keys35.glm.layer import gated_mlp, mlp_linears
from keys35.glm.weights import Overlay
from keys35.stages import prefix
from keys35.stages.capture import calibration_windows, layer_weights
from keys35.stages.job import open_job
from keys35.stages.needs import prefix_bytes
from keys35.stages.prefix_rows import _expert_rows
from keys35.stages.shared import finish_layer
from keys35.stages.states import States
from keys35.stages.streams import (
    QUANTIZED,
    SHARED,
    SOURCE,
    STREAMS,
    Handed,
    attended_files,
    lacking,
    paired_rows,
    states_attended,
)

RECIPE = tiny_recipe(encoder={"prefix": "quantized"})
LAYER = 1


@pytest.fixture
def job(tiny, tmp_path):
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        yield job


@pytest.fixture
def streams(job) -> dict[str, States]:
    tokens = calibration_windows(job)["fit"].tokens[:3]
    source = States.embedded(job.store, tokens, torch.float32)
    noise = torch.randn(source.x.shape, generator=torch.Generator().manual_seed(1))
    return {SOURCE: source, QUANTIZED: States.start(source.x + 0.1 * source.x.std() * noise)}


def test_what_lacks_counts_by_the_size_of_its_state(job) -> None:
    source = torch.randn(7, job.config.hidden_size, dtype=torch.float64) * torch.logspace(-1, 3, 7)[:, None]
    root, missing = lacking(job.config, source, 0.9 * source)
    wanted = 0.1 * torch.nn.functional.normalize(source, dim=-1) * job.config.hidden_size**0.5
    assert torch.allclose(missing, wanted, rtol=1e-2) and torch.allclose(missing, 0.1 * source * root)


def test_streams_that_agree_lack_nothing(job, streams) -> None:
    weights = layer_weights(job, job.store, LAYER)
    same = {SOURCE: streams[SOURCE], QUANTIZED: streams[SOURCE]}
    for rows in paired_rows(job, LAYER, same, weights):
        assert torch.equal(rows.source, rows.found) and not rows.missing.any()
        assert not _expert_rows(job, LAYER, rows, weights, weights)[-1].any()


def test_experts_are_left_what_the_shared_expert_and_attention_lack(job, streams) -> None:
    """With the experts' outputs corrected by it the quantized state is the source's: checked in float64."""
    weights = layer_weights(job, job.store, LAYER)
    name = "mlp.shared_experts.down_proj"
    down = 0.8 * job.source.read(f"model.layers.{LAYER}.{name}.weight").float().T
    states, lossy, at = [streams[kind].x.flatten(0, 1).double() for kind in (SOURCE, QUANTIZED)], {name: down}, 0
    for rows in paired_rows(job, LAYER, streams, weights):
        found, ids, counts, source, missing = _expert_rows(job, LAYER, rows, weights, Overlay(weights, lossy))
        router = (counts / rows.root).double()
        assert torch.equal(found, rows.found) and torch.equal(source, rows.source) and len(ids) == len(found)
        outputs = [gated_mlp(x, *mlp_linears(layer, SHARED)).double()
                   for layer, x in ((weights, rows.source), (Overlay(weights, lossy), rows.found))]
        wanted, before = (state[at : at + len(found)] + shared for state, shared in zip(states, outputs, strict=True))
        after = before + (router[:, :, None] * missing.double()[:, None]).sum(1)
        assert (after - wanted).norm() < 1e-5 * wanted.norm() < (before - wanted).norm()
        at += len(found)
    assert at == streams[SOURCE].x.shape[0] * streams[SOURCE].x.shape[1]


def test_rounded_states_are_made_again_as_they_were_kept(tiny, tmp_path) -> None:
    """bfloat16 rounds them behind attention, too, whether they lie on disk there, are handed over or pass on."""
    calibration = RECIPE.calibration.model_dump() | {"states": "bfloat16"}
    recipe, handed = tiny_recipe(encoder={"prefix": "quantized"}, calibration=calibration), Handed()
    with open_job(tiny.source, recipe, tmp_path / "work") as job:
        windows = calibration_windows(job)["fit"]
        for layer in (0, LAYER):
            prefix.encode_behind_prefix(job, layer, windows, {}, handed)()
            if layer < LAYER:
                finish_layer(job, layer, windows, {}, handed)
        kept = states_attended(job, LAYER, windows, {})
        attended_files(job, LAYER)[SOURCE].unlink()
        again = states_attended(job, LAYER, windows, {})
    assert list(handed.attended) == [LAYER] and not handed.onward and kept[SOURCE].x.dtype == torch.bfloat16
    for name in STREAMS:
        for states in (again[name], handed.attended[LAYER][name]):
            assert torch.equal(states.x, kept[name].x)
            assert all(torch.equal(a, b) for a, b in zip(states.chosen, kept[name].chosen, strict=True))


def test_disk_holds_at_most_what_is_asked_for(tiny, tmp_path, monkeypatch) -> None:
    """Looked at before each receipt, when all files are there; both are asked for: rows, and states in two places."""
    commit, found, handed = Workdir.commit, [], Handed()

    def looked_at(self: Workdir, *arguments: object) -> None:
        found.append(sum(path.stat().st_size for path in self.path("prefix").glob("*")))
        commit(self, *arguments)

    monkeypatch.setattr(Workdir, "commit", looked_at)
    with open_job(tiny.source, RECIPE, tmp_path / "work") as job:
        windows = calibration_windows(job)["fit"]
        prefix.encode_behind_prefix(job, 0, windows, {}, handed)()
        finish_layer(job, 0, windows, {}, handed)
        prefix.encode_behind_prefix(job, LAYER, windows, {}, handed)()
        states, rows = prefix_bytes(job.config, RECIPE)
    assert 0.97 * (states + rows) < max(found) < states + rows


def test_windows_that_broke_in_a_part_are_named_by_their_numbers() -> None:
    whole = States.start(torch.zeros(5, 2, 3))
    parts = [States(whole.x[:3], (None,) * 3, (1,)), States(whole.x[3:], (None,) * 2, (0, 1))]
    joined = whole.joined(parts)
    assert joined.broken == (1, 3, 4) and len(joined.chosen) == 5 and joined.x is whole.x
