"""Windows that a layer makes infinite (failure case 51): up to a tenth dropped and named, more refused."""

import json
from collections import Counter

import pytest
import torch
from builders import write_checkpoint
from small import digest, small_recipe, small_source

from keys35.errors import SourceError
from keys35.files.atomic import load_tensors
from keys35.files.source import ShardedSource
from keys35.progress import Progress
from keys35.report.measured import measurements
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble
from keys35.stages.capture import calibration_windows, capture, forget_states, hessian_file, layer_rows
from keys35.stages.dropped import dropped_anywhere
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.workers import Workers

FIT, SELECTION, WINDOW = 20, 10, 96
CHANGES = {
    "experts": {"widths": [3, 4], "bits": 3.25, "group": 2, "fallback": False},
    "calibration": {"set": "demo", "window": WINDOW, "fit_windows": FIT, "selection_windows": SELECTION,
                    "sensitivity_windows": SELECTION},
}
RECIPE = small_recipe(**CHANGES)
FEATURE, NEURON, OUTPUT = 5, 7, 11


def detecting(plain, root, token):
    """The model with a neuron in layer 0 that overflows on one token and is silent, exactly 0, on every other.

    It reads a feature that nothing else reads or writes, is tiny and negative for all tokens but one, and is
    multiplied by a norm's weight; every linear stays within what FP16 scales can hold.
    """
    opened = ShardedSource.open(plain)
    tensors = {name: opened.read(name) for name in opened.tensors}
    first = "model.layers.0."
    tensors["model.embed_tokens.weight"][:, FEATURE] = -1e-6
    tensors["model.embed_tokens.weight"][token, FEATURE] = 1.0
    tensors[first + "self_attn.o_proj.weight"][FEATURE] = 0
    tensors[first + "post_attention_layernorm.weight"][FEATURE] = 1e15
    for leaf in ("gate", "up"):
        weight = tensors[f"{first}mlp.{leaf}_proj.weight"]
        weight[:, FEATURE], weight[NEURON] = 0, 0
        weight[NEURON, FEATURE] = 1e4
    tensors[first + "mlp.down_proj.weight"][OUTPUT, NEURON] = 1e4
    side = {"tokenizer.json": (plain / "tokenizer.json").read_bytes()}
    return write_checkpoint(root, tensors, shards=2, config=opened.config, side_files=side)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return small_source(tmp_path_factory.mktemp("dropped") / "plain")


@pytest.fixture(scope="module")
def windows(plain, tmp_path_factory):
    with open_job(plain, RECIPE, tmp_path_factory.mktemp("dropped") / "look") as job:
        return calibration_windows(job)


def token_in(windows, fit, selection):
    """A token that stands in so many windows of each split."""
    counts = [Counter(token for window in windows[split].tokens.tolist() for token in set(window))
              for split in ("fit", "selection")]
    return next(token for token in sorted(counts[0]) if (counts[0][token], counts[1][token]) == (fit, selection))


def with_token(windows, token):
    return torch.nonzero((windows.tokens == token).any(1)).flatten().tolist()


@pytest.fixture(scope="module")
def one_bad(plain, windows, tmp_path_factory):
    """One of twenty fit windows and one of ten selection windows overflow: the source, the token, a finished run."""
    root = tmp_path_factory.mktemp("one-bad")
    token = token_in(windows, 1, 1)
    source = detecting(plain, root / "source", token)
    make(source, root, RECIPE)
    return source, token, root


def make(source, root, recipe, workers=1):
    with open_job(source, recipe, root / "work") as job:
        measure(job, Progress(), Workers(workers))
        allocate(job)
        quantize(job, Progress(), Workers(workers))
        assemble(job, root / "out", Progress())
        assert {(item.split, item.layer) for item in dropped_anywhere(job)} == {("fit", 0), ("selection", 0)}


def test_a_dropped_window_is_named(windows, one_bad):
    _, token, root = one_bad
    expected = []
    for split in ("fit", "selection"):
        [window] = with_token(windows[split], token)
        domain = windows[split].domains[windows[split].domain[window]]
        expected.append({"split": split, "window": window, "domain": domain, "layer": 0})
    with open_job(one_bad[0], RECIPE, root / "work") as job:
        assert measurements(job.work)["dropped_windows"] == expected
    warnings = json.loads((root / "out/KEYS35_ASSEMBLY_REPORT.json").read_text())["warnings"]
    for item in expected:
        assert any(f"{item['split']} window {item['window']} ({item['domain']}) was dropped" in w for w in warnings)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])])
def test_it_enters_no_statistic(windows, one_bad, tmp_path, backend, caplog):
    """Rows, routing and Hessians are those of the other windows, by arithmetic of their own."""
    source, token, _ = one_bad
    kept = {split: part.only([n for n in range(len(part)) if n not in with_token(part, token)])
            for split, part in windows.items()}
    recipe = small_recipe(**CHANGES, encoder={"backend": backend, "prefix": "source"})
    with open_job(source, recipe, tmp_path / "work") as job:
        sealed = calibration_windows(job)
        for layer in (0, 1):
            capture(job, job.store, layer, sealed)()
        rows = layer_rows(job, 1, sealed).to(torch.device("cpu"))
        receipt = job.work.require("measure/capture/layer-001")["data"]
        stored = {layer: load_tensors(hessian_file(job, layer)) for layer in (0, 1)}
    assert [item["split"] for item in receipt["dropped"]] == ["fit", "selection"]
    assert f"layer 0 is not finite in 1 of {FIT} fit windows" in caplog.text, "said at once"
    assert len(rows.fit.x) == (FIT - 1) * WINDOW and len(rows.selection.x) == (SELECTION - 1) * WINDOW
    assert torch.equal(rows.domain, kept["selection"].domain.repeat_interleave(WINDOW))
    assert rows.fit.x.isfinite().all() and all(h.isfinite().all() for found in stored.values() for h in found.values())
    opened = ShardedSource.open(source)
    x = opened.read("model.embed_tokens.weight")[kept["fit"].tokens.flatten()].double()
    x *= torch.rsqrt(x.square().mean(1, keepdim=True) + opened.config["rms_norm_eps"])
    x *= opened.read("model.layers.0.input_layernorm.weight").double()
    found = stored[0]["hessian.self_attn.q_a_proj"], stored[1]["hessian.mlp.shared_experts.gate_proj"]
    for hessian, inputs in zip(found, (x, rows.fit.x.double()), strict=True):
        wanted = inputs.T @ inputs / len(inputs)
        size = wanted.diagonal().sqrt()
        rounding = 2e-3 if backend == "cuda" else 1e-4  # of a GPU's short products; a window more would be 5e-2
        assert ((hessian.double() - wanted).abs() <= rounding * size * size[:, None]).all()


def test_the_mtp_layer_and_the_layer_weights_go_on_without_it(one_bad):
    source, _, root = one_bad
    with open_job(source, RECIPE, root / "work") as job:
        data = {name: job.work.require(name)["data"] for name in job.work.units() if name.startswith("experts/")}
        weights = job.work.require("measure/sensitivity")["data"]
    assert weights["windows"] == SELECTION - 1
    numbers = json.dumps([data, weights])
    assert "NaN" not in numbers and "Infinity" not in numbers
    for layer, tokens in (("layer-001", WINDOW), ("layer-002", WINDOW - 1)):  # MTP: of all that have a next one
        rows = sum(sum(part["fit_rows"]) for name, part in data.items() if layer in name)
        assert rows == 2 * (FIT - 1) * tokens, "top-2 of every token that is left"


def test_two_workers_make_the_same_bytes(one_bad, tmp_path):
    make(one_bad[0], tmp_path, RECIPE, workers=2)
    assert digest(tmp_path / "out") == digest(one_bad[2] / "out")


def test_a_pass_made_again_drops_the_same(one_bad, tmp_path):
    """Where the states before a layer were let go, they are made again, without the window, to the same bytes.

    So they are where a kill came before their file was deleted: no receipt names it any more.
    """
    source, _, root = one_bad
    files = {}
    for name in ("whole", "again", "killed"):
        with open_job(source, RECIPE, tmp_path / name) as job:
            sealed = calibration_windows(job)
            capture(job, job.store, 0, sealed)()
            states = job.work.path("states", "layer-000.safetensors")
            left = states.read_bytes()
            if name != "whole":
                forget_states(job, 0)
            if name == "killed":
                states.write_bytes(left)
            capture(job, job.store, 1, sealed)()
            assert not states.exists()
        files[name] = {key: value for key, value in digest(tmp_path / name).items() if "layer-001" in key}
    assert files["whole"] == files["again"] == files["killed"] and len(files["whole"]) > 2


@pytest.mark.slow
def test_it_is_left_out_behind_a_quantized_prefix_too(one_bad, tmp_path):
    recipe = small_recipe(**CHANGES, encoder={"prefix": "quantized"})
    make(one_bad[0], tmp_path, recipe)
    with open_job(one_bad[0], recipe, tmp_path / "work") as job:
        units = [job.work.require(f"final/layer-001/{first:04d}")["data"] for first in (0, 2)]
    assert sum(sum(unit["fit_rows"]) for unit in units) == 2 * (FIT - 1) * WINDOW


@pytest.mark.parametrize(("fit", "selection"), [(3, 0), (1, 2)])
def test_more_than_a_tenth_is_refused_by_name(plain, windows, tmp_path, fit, selection):
    token = token_in(windows, fit, selection)
    source = detecting(plain, tmp_path / "source", token)
    numbers = {split: with_token(windows[split], token) for split in windows}
    with open_job(source, RECIPE, tmp_path / "work") as job:
        with pytest.raises(SourceError, match="layer 0 gives values that are not finite") as refused:
            measure(job, Progress())
        assert job.work.receipt("measure/capture/layer-000") is None
    text = str(refused.value)
    assert f"{fit} of {FIT} fit windows" in text and "no weight of it: the arithmetic overflows" in text
    assert all(f"{number} (" in text for found in numbers.values() for number in found)


def test_a_damaged_weight_is_refused_however_few_windows_meet_it(plain, windows, one_bad, tmp_path):
    opened = ShardedSource.open(one_bad[0])
    tensors = {name: opened.read(name) for name in opened.tensors}
    tensors["model.layers.0.mlp.down_proj.weight"][OUTPUT, NEURON] = float("inf")
    side = {"tokenizer.json": (plain / "tokenizer.json").read_bytes()}
    source = write_checkpoint(tmp_path / "source", tensors, shards=2, config=opened.config, side_files=side)
    with open_job(source, RECIPE, tmp_path / "work") as job:
        with pytest.raises(SourceError, match=r"layers.0.mlp.down_proj.weight: 1 values are not finite"):
            measure(job, Progress())
