"""A trained model cut down to seconds: two layers and four experts of the bundled one, and a recipe to match."""

import json
from pathlib import Path

from builders import write_checkpoint

from keys35.demo import MODEL
from keys35.files.source import ShardedSource
from keys35.glm.config import GlmConfig
from keys35.glm.names import census
from keys35.recipe import Recipe


def small_source(root: Path, layers: int = 2, mtp: bool = True, experts: int = 4) -> Path:
    """The first layers and the MTP layer of the demo with its first experts; its router keeps their rows."""
    demo = ShardedSource.open(MODEL)
    changes = {"num_hidden_layers": layers, "num_nextn_predict_layers": int(mtp), "n_routed_experts": experts}
    config = demo.config | changes
    config["indexer_types"] = config["indexer_types"][:layers]
    config["mlp_layer_types"] = config["mlp_layer_types"][:layers]
    tensors = {}
    for name, rule in census(GlmConfig.from_dict(config)).items():
        value = demo.read(name.replace(f"layers.{layers}.", "layers.4."))
        tensors[name] = value[:experts].clone() if ".gate." in name else value
        assert tuple(tensors[name].shape) == rule.shape
    side = {"tokenizer.json": (MODEL / "tokenizer.json").read_bytes(), "LICENSE": b"be kind\n"}
    return write_checkpoint(root, tensors, shards=2, config=config, side_files=side)


def small_recipe(**changes: object) -> Recipe:
    """The demo's choices on little text: widths 2 and 3, a mean of 2.75, four shards.

    No fallback: four windows a domain are too few for one half to bear the other out.
    """
    values = {
        "name": "small",
        "experts": {"widths": [2, 3], "bits": 2.75, "group": 2, "fallback": False},
        "mtp": {"bits": 4, "hidden": "pre_norm"},
        "encoder": {"prefix": "source"},
        "calibration": {
            "set": "demo", "window": 160, "fit_windows": 12, "selection_windows": 8, "sensitivity_windows": 4,
        },
        "output": {"shards": 4},
        "panel": {"set": "demo-panel", "window": 192, "windows": 4, "random_mixes": 2},
    }
    return Recipe.model_validate(values | changes)


def recipe_file(path: Path, recipe: Recipe) -> Path:
    """The recipe as TOML (JSON values are TOML values for everything a recipe holds)."""
    lines = []
    for key, value in recipe.model_dump(mode="json").items():
        if isinstance(value, dict):
            lines += [f"[{key}]", *(f"{name} = {json.dumps(item)}" for name, item in value.items())]
        else:
            lines.insert(0, f"{key} = {json.dumps(value)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def digest(root: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder."""
    import hashlib

    files = sorted(p for p in root.rglob("*") if p.is_file())
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
