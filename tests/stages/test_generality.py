"""Other glm_moe_dsa models by configuration alone; other architectures refused at once, by name; true sizes in time."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from builders import TINY_CONFIG, Output, origin_of_report, random_source, write_index
from small import small_recipe, small_source

from keys35.bench.standin import GLM_5_3
from keys35.exl3.codebook import marker_tensor
from keys35.files.headers import TORCH_DTYPE, pack_header, tensor_nbytes
from keys35.glm.config import GlmConfig
from keys35.glm.names import Role, census, exl3_parts, shard_of
from keys35.progress import Progress
from keys35.recipe import Recipe, load_recipe
from keys35.stages.check import check
from keys35.stages.job import open_job
from keys35.stages.pipeline import run
from keys35.stages.plan import plan

OTHER_MODELS = {
    "no MTP layer": {"num_nextn_predict_layers": 0},
    "no dense layer": {"first_k_dense_replace": 0},
    "layer types by name": {"first_k_dense_replace": None, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "every layer selects": {"indexer_types": ["full"] * 3},
    "two shared experts": {"n_shared_experts": 2},
    "tied head": {"tie_word_embeddings": True},
    "other widths": {"hidden_size": 256, "n_routed_experts": 8, "q_lora_rank": 256, "v_head_dim": 128},
}


@pytest.mark.parametrize("changes", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_another_model_is_a_matter_of_its_config(changes: dict, tmp_path: Path) -> None:
    source = random_source(tmp_path / "source", {**TINY_CONFIG, **changes})
    config = GlmConfig.from_dict(json.loads((source / "config.json").read_text()))
    recipe = Recipe.model_validate({"name": "other", "experts": {"bits": 2.5}, "output": {"shards": 3}})
    widths = {layer: [2, 3] * (config.n_routed_experts // 2) for layer in config.moe_layers}
    root = Output(source, widths).write(tmp_path / "out")
    report = check(root, source, expected=recipe)
    assert report.ok, "\n".join(map(str, report.findings))
    assert plan(source, recipe).output_bytes == report.counts["tensor_bytes"]


def test_a_model_without_mtp_goes_all_the_way(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source", mtp=False, experts=2)
    calibration = {"set": "demo", "window": 96, "fit_windows": 4, "selection_windows": 4, "sensitivity_windows": 2}
    recipe = small_recipe(experts={"widths": [2, 3], "bits": 2.5}, calibration=calibration, output={"shards": 4})
    with open_job(source, recipe, tmp_path / "work") as job:
        result = run(job, tmp_path / "out", Progress(), tp=2)
    assert "mtp" not in result["validation"]["metrics"] and result["validation"]["metrics"]["kl"] > 0


def test_another_architecture_is_refused_within_a_second(tmp_path: Path) -> None:
    """Processor time of the whole process, interpreter included; nothing heavy may be imported before it."""
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "keys35.cli", "plan", str(tmp_path), "--recipe", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 1
    assert done.returncode == 4 and "Traceback" not in done.stderr
    for word in ("qwen3_moe", "Qwen3MoeForCausalLM", "glm_moe_dsa", "GLM-5.3"):
        assert word in done.stderr


def test_a_pipe_for_a_config_is_refused_and_not_waited_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    command = [sys.executable, "-m", "keys35.cli", "plan", str(tmp_path), "--recipe", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "is not a regular file" in done.stderr


def test_true_size_headers_are_checked_within_a_minute(tmp_path: Path) -> None:
    """GLM-5.3 at 2.75 bits, 276 GB of holes: every header, marker and scale is real, only trellises are zero."""
    root = write_true_size(tmp_path)
    started = time.process_time()
    report = check(root)
    assert time.process_time() - started < 60
    assert report.ok, "\n".join(map(str, report.findings))
    assert report.routed_mean == load_recipe("glm-5.3-2.75bpw").experts.budget
    assert report.counts["shards"] == 81 and report.counts["tensor_bytes"] == 276_112_149_500


def write_true_size(root: Path) -> Path:
    """The finished checkpoint of the shipped recipe, sparse on disk; its hashes are not computed."""
    config = GlmConfig.from_dict(GLM_5_3)
    rules = list(census(config).values())
    expert_bits = {str(layer): [2] * 64 + [3] * 192 for layer in config.moe_layers} | {"78": [8] * 256}
    shards: dict[int, list] = {}
    for rule in rules:
        shards.setdefault(shard_of(rule, config, 81), []).append(rule)
    weight_map, storage, counts, total = {}, {}, {}, 0
    for number, part in shards.items():
        file = f"model-{number + 1:05d}-of-00081.safetensors"
        layout = [entry for rule in part for entry in parts_of(rule, expert_bits)]
        weight_map |= {name: file for name, *_ in layout}
        total += sum(tensor_nbytes(dtype, shape) for _, dtype, shape, _ in layout)
        write_sparse(root / file, layout)
        counts[file] = len(layout)
        for name, dtype, shape, _ in layout:
            facts = {"shape": shape, "n_bytes": tensor_nbytes(dtype, shape), "dtype": str(TORCH_DTYPE[dtype])}
            module = storage.setdefault(name.rpartition(".")[0], {"stored_tensors": {}})
            module["stored_tensors"][name] = facts
            if name.endswith(".trellis"):
                module |= {"quant_format": "exl3", "bits_per_weight": shape[2] // 16, "mul1_multiplier": 0x83DCD12D}
    write_index(root, weight_map, total)
    quantization = {
        "quant_method": "exl3", "version": "keys35", "format": "keys35-v1", "bits": 2.75, "head_bits": 16,
        "codebook": "mul1", "profile": "per-expert", "dense_bits": 5, "mtp_bits": 8, "expert_bits": expert_bits,
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps({**GLM_5_3, "quantization_config": quantization}))
    (root / "quantization_config.json").write_text(json.dumps(quantization | {"tensor_storage": storage}))
    sizes = {path.name: path.stat().st_size for path in root.glob("*.safetensors")}
    report = {
        **origin_of_report(), "dense_bits": 5, "mtp_bits": 8, "total_bytes": sum(sizes.values()),
        "widths_by_layer": {str(layer): {"2": 64, "3": 192} for layer in config.moe_layers},
        "routed_mean_bits": 2.75, "routed_mean_bits_exact": "11/4", "widths_total": {"2": 4800, "3": 14400},
        "shards": [{"file": file, "bytes": size, "sha256": "", "tensors": counts[file]}
                   for file, size in sizes.items()],
        "carried_identical": [rule.name for rule in rules if not rule.quantized], "dropped": [],
    }  # fmt: skip
    (root / "KEYS35_ASSEMBLY_REPORT.json").write_text(json.dumps(report))
    (root / "tokenizer.json").write_text("{}")
    return root


def parts_of(rule, expert_bits):
    """Name, dtype, shape and contents (None: a hole) of what is stored for one source tensor."""
    if not rule.quantized:
        return [(rule.name, rule.dtypes[0], rule.shape, None)]
    bits = 5 if rule.role is Role.DENSE else expert_bits[str(rule.layer)][rule.expert]
    k, n = rule.padded
    svh = torch.ones(n, dtype=torch.float16)
    svh[rule.out_features :] = 0
    values = {"suh": torch.ones(k, dtype=torch.float16), "svh": svh, "mul1": marker_tensor("mul1").reshape(1)}
    forms = {"trellis": ("I16", (k // 16, n // 16, 16 * bits)), "suh": ("F16", (k,)), "svh": ("F16", (n,))}
    return [(name, *forms.get(part, ("I32", ())), values[part].numpy().tobytes() if part in values else None)
            for part, name in exl3_parts(rule.module).items()]


def write_sparse(path: Path, layout) -> None:
    header = pack_header([entry[:3] for entry in layout], {"format": "pt"})
    with open(path, "wb") as file:
        file.write(header)
        position = len(header)
        for _, dtype, shape, contents in layout:
            if contents:
                file.seek(position)
                file.write(contents)
            position += tensor_nbytes(dtype, shape)
        file.truncate(position)
