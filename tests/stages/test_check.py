"""The contract: a good checkpoint passes, one broken copy per rule is named by its own finding."""

import json
import os
import time
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY_CONFIG, Output, random_source, read_index, write_index
from safetensors.torch import load_file, save_file

from keys35.errors import SourceError
from keys35.files.atomic import sha256_file
from keys35.files.source import ShardedSource
from keys35.recipe import Recipe
from keys35.stages.check import RULES, CheckReport, Engine, check
from keys35.stages.engines import NAMES

WIDTHS = {1: [2, 3, 3, 3], 2: [2, 2, 3, 4]}
EXPERT = "model.layers.1.mlp.experts.0.down_proj"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
QUANT, REPORT = "quantization_config.json", "KEYS35_ASSEMBLY_REPORT.json"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
SECONDS = 5  # of processor time, so that a busy machine does not fail it


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def pristine(source: Path) -> Output:
    return Output(source, WIDTHS)


@pytest.fixture
def output(pristine: Output) -> Output:
    copy = object.__new__(Output)
    copy.__dict__ = {key: deepcopy(value) if key != "tensors" else dict(value)
                     for key, value in pristine.__dict__.items()}
    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def rules_of(report: CheckReport) -> set[str]:
    assert len({finding.rule for finding in report.findings}) <= len(report.findings)
    return {finding.rule for finding in report.findings}


def test_good_checkpoint_passes(output: Output, source: Path, tmp_path: Path) -> None:
    root = output.write(tmp_path / "out")
    recipe = Recipe.model_validate({"name": "tiny", "output": {"shards": 3}})
    for report in (check(root), check(root, source, deep=True, expected=recipe)):
        assert report.ok, "\n".join(map(str, report.findings))
        assert report.widths == {2: 3, 3: 4, 4: 1} and report.routed_mean == Fraction(11, 4)
        assert report.counts["tensors"] == len(output.tensors) and report.counts["shards"] == 3
        assert report.engines == ()


# Breaks of tensors, JSON blocks and reports, made before anything is written: rule -> change.
def drop(name: str) -> Callable[[Output], object]:
    return lambda out: out.tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Output], object]:
    return lambda out: out.tensors.update({name: tensor})


def cast(name: str, dtype: torch.dtype) -> Callable[[Output], object]:
    return lambda out: out.tensors.update({name: out.tensors[name].to(dtype)})


def cut(name: str, size: int, axis: int = 0) -> Callable[[Output], object]:
    return lambda out: out.tensors.update({name: out.tensors[name].narrow(axis, 0, size).clone()})


def poke(name: str, position: int, value: float) -> Callable[[Output], object]:
    def change(out: Output) -> None:
        tensor = out.tensors[name].clone()
        tensor[position] = value
        out.tensors[name] = tensor

    return change


def width(module: str, bits: int) -> Callable[[Output], object]:
    def change(out: Output) -> None:
        k, n, _ = out.tensors[f"{module}.trellis"].shape
        out.tensors[f"{module}.trellis"] = torch.zeros(k, n, 16 * bits, dtype=torch.int16)

    return change


def declare(**values: object) -> Callable[[Output], object]:
    return lambda out: out.quantization.update(values)


def claim(**values: object) -> Callable[[Output], object]:
    return lambda out: out.report.update(values)


def configure(**values: object) -> Callable[[Output], object]:
    return lambda out: out.config.update(values)


BEFORE_WRITING: list[tuple[str, Callable[[Output], object]]] = [
    ("name-forbidden", put("model.layers.3.shared_head.head.weight", torch.ones(4))),
    ("name-forbidden", put("model.layers.3.embed_tokens.weight", torch.ones(4))),
    ("name-forbidden", put(f"{EXPERT}.bias", torch.ones(4))),
    ("name-forbidden", put(f"{EXPERT}.weight", torch.ones(4))),
    ("name-forbidden", put(f"{EXPERT}.su", torch.ones(4, dtype=torch.int16))),
    ("name-forbidden", put(f"{EXPERT}.sv", torch.ones(4, dtype=torch.int16))),
    ("name-forbidden", put("model.layers.1.mlp.experts.0.down_proj.rank0.trellis", torch.ones(4))),
    ("name-forbidden", put(f"{EXPERT}.scale", torch.ones(4))),
    ("name-forbidden", put(f"{EXPERT}.weight_scale_inv", torch.ones(4))),
    ("name-unknown", put("model.language_model.norm.weight", torch.ones(4))),
    ("name-unknown", put("model.layers.2.self_attn.indexer.k_norm.bias", torch.ones(4))),
    ("name-missing", drop(f"{EXPERT}.suh")),
    ("name-missing", drop("model.layers.3.enorm.weight")),
    ("carried-encoded", put("lm_head.trellis", torch.ones(4, dtype=torch.int16))),
    ("carried-encoded", put("model.layers.0.self_attn.kv_b_proj.svh", torch.ones(4))),
    ("codebook", put(f"{EXPERT}.mcg", torch.tensor(-877912083, dtype=torch.int32))),
    ("marker-form", put(f"{EXPERT}.mul1", torch.tensor([-2082680531], dtype=torch.int32))),
    ("marker-form", put(f"{EXPERT}.mul1", torch.tensor(-2082680531, dtype=torch.int64))),
    ("marker-value", put(f"{EXPERT}.mul1", torch.tensor(-877912083, dtype=torch.int32))),
    ("trellis-dtype", cast(f"{EXPERT}.trellis", torch.int32)),
    ("trellis-shape", cut(f"{KV_A}.trellis", 4, axis=1)),
    ("scale-dtype", cast(f"{EXPERT}.svh", torch.bfloat16)),
    ("scale-dtype", cast(f"{EXPERT}.suh", torch.float32)),
    ("scale-length", cut(f"{KV_A}.svh", 160)),
    ("scale-length", cut(f"{EXPERT}.suh", 256)),
    ("scale-finite", poke(f"{EXPERT}.suh", 3, float("nan"))),
    ("scale-finite", poke(f"{EXPERT}.svh", 3, float("inf"))),
    ("svh-zero", poke(f"{EXPERT}.svh", 5, 0.0)),
    ("svh-padding", poke(f"{KV_A}.svh", 200, 1.0)),
    ("carried-dtype", cast(BIAS, torch.bfloat16)),
    ("carried-dtype", cast("model.layers.0.self_attn.kv_b_proj.weight", torch.float16)),
    ("carried-shape", cut("model.norm.weight", 64)),
    ("expert-width", width(EXPERT, 3)),
    ("mtp-width", declare(mtp_bits=4)),
    ("mtp-width", width("model.layers.3.mlp.experts.1.up_proj", 4)),
    ("dense-width", declare(dense_bits=6)),
    ("dense-width", width(KV_A, 4)),
    ("profile", declare(profile="per-layer")),
    ("profile", declare(profile="uniform-layer")),
    ("expert-bits", lambda out: out.quantization["expert_bits"]["1"].reverse()),
    ("expert-bits", lambda out: out.quantization["expert_bits"].pop("3")),
    ("expert-bits", lambda out: out.quantization["expert_bits"]["2"].pop()),
    ("expert-bits", declare(expert_bits="keys35")),
    ("quant-method", declare(quant_method="modelopt")),
    ("quant-bits", declare(bits=2.5)),
    ("quant-bits", declare(bits=2)),
    ("quant-bits", declare(bits="2.75")),
    ("quant-facts", declare(codebook="mcg")),
    ("quant-facts", declare(head_bits=6)),
    ("quant-facts", declare(format="keys35-v2")),
    ("quant-facts", lambda out: out.quantization.pop("version")),
    ("config-file", configure(model_type="llama")),
    ("config-file", configure(indexer_types=["shared", "full", "full"])),
    ("config-file", configure(scoring_func="softmax")),
    ("config-engine", configure(eos_token_id=0)),
    ("config-engine", configure(architectures=["LlamaForCausalLM"])),
    ("config-engine", configure(indexer_types=["full", "full", "shared", "full"])),
    ("config-tie", configure(tied_word_embeddings=False)),
    ("config-source", configure(index_topk=64)),
    ("config-source", lambda out: out.config.pop("num_key_value_heads")),
    ("carried-bytes", poke("model.norm.weight", 0, 9.0)),
    ("carried-bytes", poke(BIAS, 0, 6.817)),
    ("report-widths", claim(routed_mean_bits=2.74)),
    ("report-widths", claim(routed_mean_bits_exact="275/101")),
    ("report-widths", claim(widths_total={"2": 8})),
    ("report-widths", claim(widths_by_layer={"1": {"2": 2, "3": 2}, "2": {"2": 1, "3": 2, "4": 1}})),
    ("report-widths", claim(mtp_bits=4)),
    ("report-widths", claim(dense_bits=16)),
    ("report-recipe", claim(recipe_sha256="1" * 64)),
    ("report-recipe", lambda out: out.report["recipe"]["experts"].update(bits=3.0)),
    ("report-names", lambda out: out.report["carried_identical"].pop()),
    ("report-names", claim(dropped=["model.layers.2.self_attn.indexer.wk.weight"])),
    ("report-file", claim(dropped=None)),
    ("report-file", lambda out: out.report.pop("routed_mean_bits")),
    ("report-file", lambda out: out.report.pop("warnings")),
    ("report-file", lambda out: out.report["recipe"].pop("calibration")),
    ("report-file", claim(proxy_errors=[{"role": "expert", "bits": 2, "linears": 3, "mean": 0.1}])),
]  # fmt: skip

# What else such a break necessarily breaks.
COMPANIONS: dict[str, set[str]] = {
    "expert-width": {"quant-bits", "expert-bits", "report-widths"},
    "mtp-width": {"expert-width", "expert-bits"},
    "name-missing": {"source-names"},
    "carried-dtype": {"carried-bytes"},
    "carried-shape": {"carried-bytes"},
    "config-engine": {"config-source"},
}


@pytest.mark.parametrize("rule, change", BEFORE_WRITING, ids=[case[0] for case in BEFORE_WRITING])
def test_broken_contents(
    rule: str, change: Callable[[Output], object], output: Output, source: Path, tmp_path: Path
) -> None:
    change(output)
    root = output.write(tmp_path / "out")
    started = time.process_time()
    report = check(root, source)
    assert time.process_time() - started < SECONDS
    assert rule in rules_of(report)
    assert rules_of(report) - {rule} <= COMPANIONS.get(rule, set()), "\n".join(map(str, report.findings))
    finding = next(finding for finding in report.findings if finding.rule == rule)
    assert finding.names and finding.engines and set(finding.engines) <= set(report.engines)


# Breaks of files, made after writing.
def on_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda root: edit(root / name, change)


def crowd(root: Path) -> None:
    (root / "figures").mkdir()
    for number in range(10_001):
        (root / "figures" / str(number)).touch()


def rename_all(root: Path) -> None:
    index = read_index(root)
    for path in sorted(root.glob("*.safetensors")):
        path.rename(root / path.name.replace("of-00003", "of-00004"))
    moved = {name: file.replace("of-00003", "of-00004") for name, file in index["weight_map"].items()}
    write_index(root, moved, index["metadata"]["total_size"])


def unaligned(root: Path) -> None:
    data = (root / SHARD).read_bytes()
    size = int.from_bytes(data[:8], "little")
    longer = (size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" "
    (root / SHARD).write_bytes(longer + data[8 + size :])


def duplicate(root: Path) -> None:
    tensors = load_file(root / SHARD)
    tensors["model.embed_tokens.weight"] = torch.ones(2)
    save_file(tensors, root / SHARD)


def nest(root: Path) -> None:
    (root / "sub").mkdir()
    save_file({"x": torch.ones(1)}, root / "sub" / "x.safetensors")


def stray(root: Path) -> None:
    save_file({"x": torch.ones(1)}, root / "model-00082-of-00082.safetensors")


def on_module(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return on_json(QUANT, lambda value: change(value["tensor_storage"][name]))


def on_embedded(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return on_json("config.json", lambda value: change(value["quantization_config"]))


LOST_SHARD = {"name-missing", "index-size", "quant-bits", "report-widths", "report-shards", "tensor-storage",
              "source-names"}  # fmt: skip


def flip_last_byte(root: Path) -> None:
    data = bytearray((root / SHARD).read_bytes())
    data[-1] ^= 1
    (root / SHARD).write_bytes(data)


AFTER_WRITING: list[tuple[str, Callable[[Path], object], set[str]]] = [
    ("folder-entries", crowd, set()),
    ("partial-left", lambda root: (root / f"{SHARD}.partial").write_bytes(b""), set()),
    ("pickled-weights", lambda root: (root / "pytorch_model.bin").write_bytes(b""), set()),
    ("shard-header", lambda root: os.truncate(root / SHARD, 5000), LOST_SHARD | {"index-shard"}),
    ("shard-aligned", unaligned, {"report-shards"}),
    ("shard-names", rename_all, {"report-shards"}),
    ("shard-names", nest, set()),
    ("shard-stray", stray,
     {"index-tensor", "index-size", "name-unknown", "tensor-storage", "report-shards"}),
    ("index-file", lambda root: (root / INDEX).unlink(), {"shard-stray", "index-tensor"}),
    ("index-file", lambda root: (root / INDEX).write_text("{"), {"shard-stray", "index-tensor"}),
    ("index-file", on_json(INDEX, lambda v: v["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
     {"index-tensor"}),
    ("index-file", on_json(INDEX, lambda v: v.pop("metadata")), {"shard-stray", "index-tensor"}),
    ("index-shard", lambda root: (root / SHARD).unlink(), LOST_SHARD),
    ("index-tensor", on_json(INDEX, lambda v: v["weight_map"].pop("lm_head.weight")), set()),
    ("index-tensor", on_json(INDEX, lambda v: v["weight_map"].update({"lm_head.weight": SHARD})), set()),
    ("index-size", on_json(INDEX, lambda v: v["metadata"].update(total_size=None)), set()),
    ("index-size", on_json(INDEX, lambda v: v["metadata"].update(total_size=5)), set()),
    ("tensor-twice", duplicate, {"index-size", "index-tensor", "carried-shape", "carried-dtype",
                                 "carried-bytes", "tensor-storage", "report-shards"}),
    ("config-file", lambda root: (root / "config.json").write_text("{"), set()),
    ("config-tie", on_json("config.json", lambda v: v.pop("tie_word_embeddings")), set()),
    ("config-tie", on_json("config.json", lambda v: v.update(tie_word_embeddings=True)), set()),
    ("quant-file", lambda root: (root / QUANT).unlink(), {"dense-width", "mtp-width"}),
    ("quant-file", lambda root: (root / QUANT).write_text("[]"), {"dense-width", "mtp-width"}),
    ("quant-copies", on_embedded(lambda block: block.update(bits=2.0)), set()),
    ("quant-copies", on_json(QUANT, lambda v: v.update(note="only here")), set()),
    ("quant-copies", on_embedded(lambda block: block["expert_bits"]["1"].reverse()), set()),
    ("quant-method", on_json("config.json", lambda v: v.pop("quantization_config")), {"quant-copies"}),
    ("tensor-storage", on_json(QUANT, lambda v: v.pop("tensor_storage")), set()),
    ("tensor-storage", on_module(EXPERT, lambda module: module.update(bits_per_weight=4)), set()),
    ("tensor-storage", on_module(EXPERT, lambda module: module.pop("mul1_multiplier")), set()),
    ("tensor-storage", on_module("lm_head", lambda module: module.clear()), set()),
    ("tensor-storage", on_module("lm_head", lambda module: module.update(quant_format="exl3")), set()),
    ("tensor-storage", on_json(QUANT, lambda v: v["tensor_storage"].update(head=v["tensor_storage"].pop("lm_head"))),
     set()),
    ("side-files", lambda root: (root / "tokenizer.json").unlink(), set()),
    ("side-bytes", lambda root: (root / "LICENSE").write_text("changed"), set()),
    ("report-file", lambda root: (root / REPORT).unlink(), set()),
    ("report-file", lambda root: (root / REPORT).write_text("{"), set()),
    ("report-shards", on_json(REPORT, lambda v: v["shards"].pop()), set()),
    ("report-shards", on_json(REPORT, lambda v: v["shards"][0].update(bytes=1)), set()),
    ("report-shards", on_json(REPORT, lambda v: v["shards"][0].update(tensors=1)), set()),
    ("report-file", on_json(REPORT, lambda v: v.update(shards=[3])), set()),
    ("report-shards", on_json(REPORT, lambda v: v.update(total_bytes=5)), set()),
    ("report-shards", on_json(REPORT, lambda v: v["shards"][1].update(sha256="0" * 64)), set()),
    ("report-shards", flip_last_byte, set(RULES)),
]  # fmt: skip


@pytest.mark.parametrize("rule, change, companions", AFTER_WRITING, ids=[case[0] for case in AFTER_WRITING])
def test_broken_files(
    rule: str, change: Callable[[Path], object], companions: set[str], output: Output, source: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    root = output.write(tmp_path / "out")
    change(root)
    deep = rule == "report-shards"  # only hashes show a changed byte, and deep also decodes everything
    started = time.process_time()
    report = check(root, source, deep=deep)
    assert deep or time.process_time() - started < SECONDS
    assert rule in rules_of(report)
    assert rules_of(report) - {rule} <= companions, "\n".join(map(str, report.findings))


def test_width_outside_the_format(output: Output, source: Path, tmp_path: Path) -> None:
    trellis = output.tensors[f"{EXPERT}.trellis"]
    output.tensors[f"{EXPERT}.trellis"] = torch.zeros(*trellis.shape[:2], 72, dtype=torch.int16)
    report = check(output.write(tmp_path / "half"), source)
    assert "width-legal" in rules_of(report) and report.routed_mean is None
    output.tensors[f"{EXPERT}.trellis"] = torch.zeros(*trellis.shape[:2], 16 * 9, dtype=torch.int16)
    assert "width-legal" in rules_of(check(output.write(tmp_path / "nine"), source))


def test_model_that_four_ranks_cannot_cut(tmp_path: Path) -> None:
    narrow = {**TINY_CONFIG, "moe_intermediate_size": 256, "vocab_size": 255}
    source = random_source(tmp_path / "source", narrow)
    report = check(Output(source, WIDTHS).write(tmp_path / "out"), source)
    assert rules_of(report) == {"tp-cut"}
    names = report.findings[0].names
    assert "lm_head.weight" in names and f"{EXPERT}.trellis" in names


def test_zero_column_of_the_source_may_have_zero_svh(output: Output, source: Path, tmp_path: Path) -> None:
    copied = tmp_path / "source"
    copied.mkdir()
    for path in source.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    shard = copied / read_index(copied)["weight_map"][f"{EXPERT}.weight"]
    tensors = load_file(shard)
    tensors[f"{EXPERT}.weight"][5] = 0
    save_file(tensors, shard)
    poke(f"{EXPERT}.svh", 5, 0.0)(output)
    root = output.write(tmp_path / "out")
    assert check(root, copied).ok
    assert rules_of(check(root)) == {"svh-zero"}  # without the source nobody can know


def test_tied_source_gives_an_untied_output(tmp_path: Path) -> None:  # case 16
    source = random_source(tmp_path / "source", {**TINY_CONFIG, "tie_word_embeddings": True})
    output = Output(source, WIDTHS)
    assert check(output.write(tmp_path / "out"), source).ok
    put("lm_head.weight", output.tensors["lm_head.weight"] + 1)(output)
    assert rules_of(check(output.write(tmp_path / "other"), source)) == {"carried-bytes"}


def test_dropped_indexer_of_a_shared_layer_is_declared(output: Output, source: Path, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.indexer.wk.weight"
    copied = tmp_path / "source"
    copied.mkdir()
    for path in source.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    index = read_index(copied)
    shard = "model-00002-of-00002.safetensors"
    save_file(load_file(copied / shard) | {name: torch.ones(4)}, copied / shard)
    write_index(copied, {**index["weight_map"], name: shard}, index["metadata"]["total_size"] + 16)
    assert rules_of(check(output.write(tmp_path / "silent"), copied)) == {"report-names"}
    output.report["dropped"] = [name]
    assert check(output.write(tmp_path / "declared"), copied).ok


def test_reference_of_another_model(output: Output, tmp_path: Path) -> None:
    shorter = {**TINY_CONFIG, "num_hidden_layers": 2, "indexer_types": ["full"] * 2}
    other = random_source(tmp_path / "other", shorter)
    assert {"source-names", "config-source"} <= rules_of(check(output.write(tmp_path / "out"), other))


def test_a_checkpoint_is_no_reference(output: Output, tmp_path: Path) -> None:
    """Given for its source, it was hundreds of missing names and a lost quantization block of the source."""
    root = output.write(tmp_path / "out")
    with pytest.raises(SourceError, match="is itself an EXL3 checkpoint.*give the one it was made from"):
        check(root, root)


def test_quantization_block_of_the_source_is_kept(output: Output, source: Path, tmp_path: Path) -> None:
    copied = tmp_path / "source"
    copied.mkdir()
    for path in source.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    block = {"quant_method": "fp8"}
    edit(copied / "config.json", lambda config: config.update(quantization_config=block))
    assert rules_of(check(output.write(tmp_path / "lost"), copied)) == {"quant-original"}
    output.quantization["original_quantization_config"] = block
    assert check(output.write(tmp_path / "kept"), copied).ok


@pytest.mark.parametrize("file", ["config.json", QUANT])
def test_a_config_that_was_changed_is_known_without_the_source(output: Output, tmp_path: Path, file: str) -> None:
    """Another rope_theta passed, and what is published is checked without the source."""
    root = output.write(tmp_path / "out")
    edit(root / REPORT, lambda report: report.update(configs={file: sha256_file(root / file)}))
    assert check(root).ok
    if file == "config.json":
        edit(root / file, lambda config: config["rope_parameters"].update(rope_theta=10000.0))
    else:
        (root / file).write_text((root / file).read_text() + "\n")
    assert rules_of(check(root)) == {"report-configs"}
    edit(root / REPORT, lambda report: report.update(changed_files=[file]))
    assert check(root).ok


def test_declared_change_of_a_side_file_is_accepted(output: Output, source: Path, tmp_path: Path) -> None:
    output.report["changed_files"] = ["LICENSE"]
    root = output.write(tmp_path / "out")
    (root / "LICENSE").write_text("be kinder\n")
    assert check(root, source).ok


@pytest.mark.parametrize("section", [
    {"experts": {"widths": (2, 3, 5), "bits": 2.75}}, {"experts": {"bits": 2.5}}, {"dense": {"bits": 4}},
    {"mtp": {"bits": 4}}, {"output": {"shards": 4}},
])  # fmt: skip
def test_recipe_is_held_against_it(section: dict, output: Output, source: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"name": "tiny", "output": {"shards": 3}, **section})
    report = check(output.write(tmp_path / "out"), source, expected=recipe)
    assert rules_of(report) == {"recipe"} and len(report.findings[0].names) == 1


def test_embedded_copy_may_leave_out_the_long_tables(output: Output, source: Path, tmp_path: Path) -> None:
    root = output.write(tmp_path / "out")
    edit(root / "config.json", lambda config: config["quantization_config"].pop("expert_bits"))
    assert check(root, source).ok


def test_nothing_is_an_exception(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not a folder"):
        check(tmp_path / "absent")
    report = check(tmp_path)
    assert {"config-file", "quant-file", "report-file", "index-file"} == rules_of(report)


@pytest.mark.parametrize(("name", "change", "rule"), [
    ("config.json", {"rope_parameters": 5}, "config-file"),
    ("config.json", {"text_config": "x"}, "config-file"),
    (QUANT, {"tensor_storage": {"model.norm": {"stored_tensors": ["a"]}}}, "tensor-storage"),
    (REPORT, {"shards": [{"file": None, "bytes": 1, "sha256": ""}]}, "report-file"),
    (REPORT, {"changed_files": 5}, None),
])
def test_a_file_of_the_wrong_form_is_a_finding(
    output: Output, source: Path, tmp_path: Path, name: str, change: dict, rule: str | None
) -> None:
    root = output.write(tmp_path)
    edit(root / name, lambda value: value.update(change))
    assert rule is None or rule in rules_of(check(root, source))


DEEP = {
    "value-finite": poke("model.layers.1.input_layernorm.weight", 0, float("nan")),
    "value-scale": lambda out: out.tensors.update({f"{EXPERT}.suh": torch.full((512,), 3000.0).half()}),
}


@pytest.mark.parametrize("rule", DEEP)
def test_values_are_decoded_on_demand(rule: str, output: Output, tmp_path: Path) -> None:
    DEEP[rule](output)
    root = output.write(tmp_path / "out")
    assert check(root).ok and rules_of(check(root, deep=True)) == {rule}


def test_large_carried_tensors_are_looked_at_in_pieces(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 1.9 GB took 8 GB at once: what is finite is asked in copies."""
    read = ShardedSource.read

    def small(self: ShardedSource, name: str, pinned: bool = False) -> torch.Tensor:
        assert name != "lm_head.weight"
        return read(self, name, pinned)

    monkeypatch.setattr(ShardedSource, "read", small)
    monkeypatch.setattr("keys35.stages.check_tensors.PIECE_BYTES", 1000)
    for row in (0, 77, 255):
        poke("lm_head.weight", row, float("inf"))(output)
    put("model.norm.weight", torch.tensor(1.0, dtype=torch.bfloat16))(output)
    report = check(output.write(tmp_path / "out"), deep=True)
    assert rules_of(report) == {"value-finite", "carried-shape"}
    width = output.tensors["lm_head.weight"].shape[1]
    assert f"lm_head.weight has {3 * width} that are not" in report.findings[-1].message


@pytest.mark.parametrize(("name", "rule"), [
    ("model.norm.weight", "carried-dtype"), (f"{EXPERT}.trellis", "trellis-dtype"), (f"{EXPERT}.suh", "scale-dtype"),
])
def test_values_of_another_dtype_are_not_decoded(name: str, rule: str, output: Output, tmp_path: Path) -> None:
    """torch has no isfinite for FP8, which was a traceback: a checkpoint of another maker, or an FP8 source."""
    kept = output.tensors[name]
    output.tensors[name] = torch.ones(kept.shape).to(torch.float8_e4m3fn)
    found = rules_of(check(output.write(tmp_path / "out"), deep=True))
    assert rule in found and not found & {"value-finite", "value-scale"}


def test_noise_is_not_the_source(output: Output, source: Path, tmp_path: Path) -> None:
    """The builder's trellises are random, so every sampled linear must be named."""
    report = check(output.write(tmp_path / "out"), source, sample=9)
    assert rules_of(report) == {"value-source"} and len(report.findings[0].names) == 9
    with pytest.raises(SourceError, match="--reference"):
        check(tmp_path / "out", sample=1)


WISHES = {rule: set(RULES[rule].engines) for rule in RULES if not RULES[rule].contract}


def test_an_engines_own_wishes_count_only_when_it_is_asked_for(output: Output, tmp_path: Path) -> None:
    root = output.write(tmp_path / "out")
    plain = check(root)
    assert plain.ok and {note.rule for note in plain.notes} == {"layer-width", "layer-bits", "dense-declared"}
    for engine, name in NAMES.items():
        report = check(root, engine=engine)
        assert rules_of(report) == {note.rule for note in plain.notes if name in WISHES[note.rule]}
        assert report.ok == (engine is Engine.TENSORFOLD)


def test_other_engines_refusals_are_notes(output: Output, tmp_path: Path) -> None:
    declare(quant_method="modelopt")(output)
    root = output.write(tmp_path / "out")
    assert rules_of(check(root)) == {"quant-method"} == rules_of(check(root)) - {"layer-width"}
    assert check(root, engine=Engine.TENSORFOLD).ok
    assert "quant-method" in rules_of(check(root, engine=Engine.VLLM_EXL3))
    assert "quant-method" in {note.rule for note in check(root, engine=Engine.TENSORFOLD).notes}


@pytest.mark.parametrize("profile", ["per-expert", "uniform-layer", "bf16-rest"])
def test_profiles_pass_and_say_for_whom(profile: str, source: Path, tmp_path: Path) -> None:
    widths = {1: [2, 2, 2, 2], 2: [3, 3, 3, 3]} if profile == "uniform-layer" else WIDTHS
    root = Output(source, widths, profile=profile).write(tmp_path / "out")
    report = check(root, source, deep=True)
    assert report.ok, "\n".join(map(str, report.findings))
    accepted = {engine for engine in NAMES if check(root, engine=engine).ok}
    assert accepted == {"per-expert": {Engine.TENSORFOLD}, "uniform-layer": set(NAMES), "bf16-rest": set()}[profile]


def test_plain_dense_linears_must_be_declared_so(source: Path, tmp_path: Path) -> None:
    output = Output(source, WIDTHS, profile="bf16-rest")
    declare(dense_bits=5)(output)
    root = output.write(tmp_path / "out")
    assert rules_of(check(root)) == {"dense-width"}
    assert "dense-encoded" in rules_of(check(root, engine=Engine.TENSORFOLD))
    put(f"{KV_A}.trellis", torch.ones(4, dtype=torch.int16))(output)
    assert "carried-encoded" in rules_of(check(output.write(tmp_path / "both"), source))


def test_every_rule_has_a_broken_copy() -> None:
    elsewhere = {"width-legal", "tp-cut", "source-names", "quant-original", "recipe", "report-configs"}
    elsewhere |= {"value-source", *DEEP, *WISHES}
    tested = {rule for rule, _ in BEFORE_WRITING} | {case[0] for case in AFTER_WRITING} | elsewhere
    assert tested == set(RULES)
