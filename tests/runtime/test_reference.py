import json
import os
import shutil

import pytest
import torch
from builders_exl3 import DEMO, demo_config, demo_windows
from safetensors.torch import load_file, save_file

from keys35.errors import PlanError, RankError, RecipeError, SourceError
from keys35.files.source import ShardedSource
from keys35.glm.stream import Head, embed, trunk
from keys35.glm.weights import WeightStore
from keys35.runtime.panel import Panel
from keys35.runtime.reference import Reference, make_reference


def test_a_panel_survives_saving(tmp_path, panel):
    panel.save(tmp_path / "panel.json")
    again = Panel.load(tmp_path / "panel.json")
    assert again.fingerprint == panel.fingerprint and again.domains == panel.domains
    assert all(torch.equal(a, b) for a, b in zip(again.tokens, panel.tokens, strict=True))


def test_a_panel_says_what_is_wrong_with_it(panel):
    with pytest.raises(RecipeError, match="fewer than 3"):
        Panel.of("short", [torch.tensor([1, 2])], ["prose"])
    with pytest.raises(RecipeError, match="0 windows"):
        Panel.of("none", [], [])
    with pytest.raises(RecipeError, match="vocabulary ends at 99"):
        panel.check_vocabulary(100)


def test_a_full_disk_is_known_before_the_source_is_streamed(tmp_path, panel, source_store, reference, monkeypatch):
    def too_late(*_, **__):
        raise AssertionError("the source is streamed")

    size = sum(path.stat().st_size for path in reference.root.glob("*.safetensors"))
    monkeypatch.setattr("keys35.runtime.reference._pass", too_late)
    monkeypatch.setattr("keys35.files.atomic.free_bytes", lambda path: int(0.99 * size))
    with pytest.raises(PlanError, match=r"reference: needs \d+ bytes, \d+ are free"):
        make_reference(source_store, panel, tmp_path / "reference")
    monkeypatch.setattr("keys35.files.atomic.free_bytes", lambda path: size)
    with pytest.raises(AssertionError, match="streamed"):
        make_reference(source_store, panel, tmp_path / "reference")


def test_logits_from_stored_states_are_the_models_own(reference, panel, source_store):
    heads = reference.heads(1, 0, torch.device("cpu"))
    direct = Head.of_trunk(source_store)(trunk(source_store, embed(source_store, panel.tokens[:1]))[0])
    stored = heads["hidden"](reference.states(0)["hidden"])
    assert torch.allclose(stored, direct, atol=1e-4)
    assert reference.states(0)["mtp"].shape == (255, 128)


def test_the_noise_floor_of_a_repeatable_machine_is_zero(reference):
    assert reference.facts["noise"]["kl"] < 1e-9 and reference.facts["noise"]["changed_top1"] == 0


def test_a_reference_is_reused_only_for_its_own_panel(reference, panel, source_store):
    stamp = (reference.root / "reference.json").stat().st_mtime_ns
    make_reference(source_store, panel, reference.root)
    assert (reference.root / "reference.json").stat().st_mtime_ns == stamp
    other = Panel.of("other", demo_windows("eval-prose.txt", 1, 30), ["prose"])
    with pytest.raises(RankError, match="another panel"):
        Reference.open(reference.root, other)


def test_a_lost_window_says_what_brings_it_back(reference, panel, tmp_path):
    shutil.copytree(reference.root, tmp_path / "copy")
    (tmp_path / "copy" / "window-00001.safetensors").unlink()
    copy = Reference.open(tmp_path / "copy", panel)
    with pytest.raises(RankError, match="window-00001.safetensors is missing.*delete the reference folder"):
        copy.states(1)


def test_facts_that_are_none_say_what_brings_them_back(reference, panel, source_store, tmp_path):
    """Whole JSON that is no object, or lacks something, was a traceback."""
    copy = shutil.copytree(reference.root, tmp_path / "copy")
    facts = json.loads((copy / "reference.json").read_text())
    lacks = {key: value for key, value in facts.items() if key != "noise"}
    for value, words in (([], "it is no object"), (lacks, "it lacks noise"), (facts | {"sha256": 1}, "'sha256' is no")):
        (copy / "reference.json").write_text(json.dumps(value))
        with pytest.raises(RankError, match=f"reference.json: {words}.*; delete the reference folder"):
            make_reference(source_store, panel, copy)
    (copy / "reference.json").write_text(json.dumps(facts))
    (copy / "head.safetensors").unlink()
    with pytest.raises(RankError, match="head.safetensors is missing or was changed; delete the reference folder"):
        make_reference(source_store, panel, copy)
    (tmp_path / "panel.json").write_text('{"name": "a", "windows": [{"domain": "b", "tokens": ["c"]}]}')
    with pytest.raises(RankError, match="panel.json: entry 0 is no integer; make the panel again"):
        Panel.load(tmp_path / "panel.json")


def test_vocabulary_shares_of_the_heads_compose(reference):
    states = reference.states(0)["hidden"][:5]
    whole = reference.heads(1, 0, torch.device("cpu"))["hidden"](states)
    shares = [reference.heads(4, rank, torch.device("cpu"))["hidden"](states) for rank in range(4)]
    assert torch.allclose(torch.cat(shares, -1), whole, atol=1e-5)


def test_heads_lie_in_a_folder_of_any_name(reference, panel, tmp_path):
    """Ranks could not open them where a name is not UTF-8, after a job had done all its work."""
    folder = shutil.copytree(reference.root, tmp_path / os.fsdecode(b"\xe9tude"))
    kept = load_file(reference.root / "head.safetensors")["weight"]
    for rank in range(2):
        head = Reference.open(folder, panel).heads(2, rank, torch.device("cpu"))["hidden"]
        assert torch.equal(head.weight, kept.chunk(2)[rank])


def test_a_model_without_mtp_has_a_reference_too(tmp_path, panel):
    config = ShardedSource.open(DEMO / "model").config | {"num_nextn_predict_layers": 0}
    store = WeightStore(ShardedSource.open(DEMO / "model"), demo_config().from_dict(config))
    reference = make_reference(store, panel, tmp_path, repeat=False)
    assert reference.facts["states"] == ["hidden"] and reference.facts["noise"] is None


@pytest.mark.parametrize(("name", "words"), [
    ("model.norm.weight", "model.norm.weight is not finite; fetch it again"),
    ("model.layers.1.post_attention_layernorm.weight", r"not finite in 1 of 1 windows.*such as 0 \(prose\)"),
])
def test_a_source_that_is_not_finite_is_no_reference(tmp_path, name, words):
    """Every figure was NaN, in a JSON file that only Python reads, and its page ended in a ValueError."""
    source = shutil.copytree(DEMO / "model", tmp_path / "source")
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][3] = torch.nan
            save_file(tensors, path)
    store = WeightStore(ShardedSource.open(source), demo_config())
    panel = Panel.of("short", demo_windows("eval-prose.txt", 1, 30), ["prose"])
    with pytest.raises(SourceError, match=words):
        make_reference(store, panel, tmp_path / "reference")
    assert not (tmp_path / "reference/reference.json").exists()
