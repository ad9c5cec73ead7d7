"""A finished checkpoint's report files, made up in full, so that tests of page and card take no run."""

import json
import random
from fractions import Fraction
from pathlib import Path

from keys35.recipe import Recipe

SHA = "ab" * 32
LAYERS, EXPERTS = (1, 2, 3), 8


def metrics(kl: float, ppl: float = 10.5) -> dict:
    numbers = {
        "tokens": 512, "kl": kl, "kl_reverse": kl * 1.1, "kl_median": kl / 2, "kl_p90": kl * 3, "kl_p99": kl * 9,
        "top1": 1 - kl, "top2": 1 - 4 * kl, "top5_reference": 0.7, "top5": 0.69, "ppl_reference": 10.0, "ppl": ppl,
    }
    mtp = {"top1": 0.5, "acceptance": 0.6, "top1_reference": 0.51, "acceptance_reference": 0.65}
    return {**numbers, "windows": 2, "domains": {"prose": numbers}, "mtp": mtp,
            "per_window": [{"window": 0, "domain": "prose", **numbers}],
            "confidence": [{"from": 0.0, "to": 0.5, "tokens": 512, "kl": kl, "top1": 0.9}]}


def storage(widths: dict[int, list[float]]) -> dict:
    """128 x 128 linears for every expert, an MTP layer, one dense linear, and carried tensors."""
    modules = {}

    def linear(module: str, bits: float) -> None:
        shapes = {"trellis": [8, 8, int(16 * bits)], "suh": [128], "svh": [128], "mul1": []}
        nbytes = {"trellis": int(8 * 8 * 16 * bits * 2), "suh": 256, "svh": 256, "mul1": 4}
        parts = {f"{module}.{part}": {"shape": shape, "n_bytes": nbytes[part], "dtype": "x"}
                 for part, shape in shapes.items()}
        modules[module] = {"stored_tensors": parts, "quant_format": "exl3", "bits_per_weight": bits}

    for layer, row in widths.items():
        for expert, bits in enumerate(row):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                linear(f"model.layers.{layer}.mlp.experts.{expert}.{leaf}", bits)
    linear("model.layers.1.self_attn.q_a_proj", 5)
    for module, count in (("model.embed_tokens", 4096), ("lm_head", 4096), ("model.norm", 64)):
        tensor = {"shape": [count], "n_bytes": 2 * count, "dtype": "torch.bfloat16"}
        modules[module] = {"stored_tensors": {f"{module}.weight": tensor}}
    return modules


def write_out(
    root: Path, ours: float = 0.05, mixes: tuple[float, ...] = (0.06, 0.07), low: float = 2, **quality: object
) -> Path:
    """The report files of a small checkpoint whose allocation scores `ours` and whose random mixes score `mixes`.

    low: the least width, which two experts of each layer have.
    """
    root.mkdir(parents=True, exist_ok=True)
    chooser = random.Random(1)
    widths = {layer: [low, low] + [3] * (EXPERTS - 2) for layer in LAYERS}
    mean = Fraction(sum(map(sum, widths.values()))) / (len(LAYERS) * EXPERTS)
    recipe = Recipe(name="made-up").model_dump(mode="json")
    report = {
        "format": "keys35-v1", "tool": "keys35 0.1.0", "recipe": recipe, "recipe_sha256": SHA,
        "source_fingerprint": {"config.json": SHA, "model.safetensors": f"9000000 bytes, header ab, sha256 {SHA}"},
        "calibration_text_sha256": SHA, "routed_mean_bits": float(mean), "routed_mean_bits_exact": str(mean),
        "widths_by_layer": {str(layer): {str(low): 2, "3": EXPERTS - 2} for layer in LAYERS},
        "widths_total": {str(low): 6, "3": 18}, "mtp_bits": 8, "dense_bits": 5,
        "proxy_errors": [{"role": "expert", "bits": 2, "linears": 18, "mean": 0.03, "max": 0.05}],
        "shards": [{"file": "model-00001-of-00001.safetensors", "bytes": 999, "sha256": SHA, "tensors": 9}],
        "total_bytes": 999, "carried_identical": ["model.norm.weight"], "dropped": [], "warnings": [],
    }
    panel = {"set": "made-up-panel", "sha256": SHA, "windows": 2, "tokens": 512}
    scored = {
        "panel": panel, "noise_floor": {"kl": 0.001, "changed_top1": 0.002}, "metrics": metrics(ours), "tp": 2,
        "ranks": [{"rank": r, "bytes_read": 500, "sharded": 400, "replicated": 100, "expert": 300} for r in range(2)],
        "checkpoint_bytes": 990, "tp_against_one": None,
    } | quality
    layers = {}
    for layer in (*LAYERS, 4):
        cost = [[c, c / 4, c / 16] for c in (chooser.uniform(1e-4, 1e-3) for _ in range(EXPERTS))]
        layers[str(layer)] = {
            "widths": [low, 3, 4], "fit_rows": [900 + 100 * layer + e for e in range(EXPERTS)],
            "selection_rows": [50] * EXPERTS, "proxy_error": [[0.03, 0.01, 0.002]] * EXPERTS, "cost": cost,
            "chosen": widths.get(layer, [8] * EXPERTS),
        }
    layers["4"] |= {"widths": [8], "proxy_error": [[1e-5]] * EXPERTS}
    del layers["4"]["cost"]
    summary = {k: v for k, v in metrics(ours).items() if k not in ("per_window", "confidence")}
    names = {"allocation": ours} | {f"random-{i}": kl for i, kl in enumerate(mixes)} | {"uniform-3": ours / 2}
    measured = {
        "format": "keys35-measurements-v1", "layers": layers, "dense": {"1": {"linears": 1, "mean": 1e-4, "max": 1e-4}},
        "sets": {name: {"mean": "3" if "uniform" in name else str(mean), "counts": {"3": 24}, "predicted_kl": kl * 0.8}
                 for name, kl in names.items()},
        "baselines": {name: {"panel_sha256": SHA, "metrics": {**summary, "kl": kl}} for name, kl in names.items()},
    }
    bits = {str(layer): row for layer, row in {**widths, 4: [8] * EXPERTS}.items()}
    files = {
        "KEYS35_ASSEMBLY_REPORT.json": report, "KEYS35_QUALITY.json": scored, "KEYS35_MEASUREMENTS.json": measured,
        "quantization_config.json": {"expert_bits": bits, "tensor_storage": storage({**widths, 4: [8] * EXPERTS})},
        "config.json": {"model_type": "glm_moe_dsa", "num_hidden_layers": 4},
    }
    for name, value in files.items():
        (root / name).write_text(json.dumps(value))
    return root
