"""GLM-5.3's names and ratios at small widths, random weights: what tests of scale run on, in seconds."""

from collections.abc import Callable
from pathlib import Path

from builders import random_source
from small import digest

from keys35.bench.standin import GLM_5_3
from keys35.demo import MODEL
from keys35.files.ledger import Workdir
from keys35.progress import Progress, Tick
from keys35.recipe import Recipe
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble
from keys35.stages.job import open_job
from keys35.stages.measure import measure
from keys35.stages.quantize import quantize
from keys35.stages.workers import Workers

LAYERS, EXPERTS = 3, 4
TINY = GLM_5_3 | {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 2048,
    "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 64,
    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "qk_head_dim": 64, "v_head_dim": 64,
    "index_n_heads": 2, "index_head_dim": 64, "index_topk": 32, "indexer_types": ["full", "full", "shared"],
    "eos_token_id": [0], "pad_token_id": 0,
}  # fmt: skip


CUT_IN_FOUR = {
    "intermediate_size": 512, "moe_intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "index_n_heads": 4,
}  # fmt: skip
"""The widths that `check` insists on: whole blocks of 128 on each of four ranks."""


def tiny_source(root: Path, shards: int = 14, **changes: object) -> Path:
    """A dense layer, two MoE layers and the MTP layer, a layer over several shards, with the demo's tokenizer."""
    random_source(root, TINY | changes, shards)
    (root / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    return root


def tiny_recipe(**changes: object) -> Recipe:
    """One expert per unit, so that there are many; widths 3 and 4, which the CPU encodes fastest."""
    values = {
        "name": "tiny",
        "experts": {"widths": [3, 4], "bits": 3.25, "group": 1},
        "mtp": {"bits": 4},
        "encoder": {"prefix": "source"},
        "calibration": {"set": "demo", "window": 48, "fit_windows": 6, "selection_windows": 4,
                        "sensitivity_windows": 4},
        "output": {"shards": LAYERS + 3},  # the MTP layer, embedding, norm with head
        "panel": {"set": "demo-panel", "window": 48, "windows": 4, "random_mixes": 1},
    }
    return Recipe.model_validate(values | changes)


def make_tiny(
    source: Path, root: Path, workers: Workers, show: Callable[[Tick], None] | None = None, **changes: object
) -> dict[str, str]:
    """The tiny model's checkpoint in root/out, made in root/work; hashes of all that assembly writes."""
    with open_job(source, tiny_recipe(), root / "work", **changes) as job:
        progress = Progress(job.work, show)
        measure(job, progress, workers)
        allocate(job)
        quantize(job, progress, workers)
        assemble(job, root / "out", progress)
    return digest(root / "out")


def begun(work: Path) -> list[str]:
    """Units in the order they were begun, by the log."""
    return [event["unit"] for event in Workdir.open(work, None).events() if event["event"] == "begun"]
