"""`python -m keys35.bench.ranks CHECKPOINT --source SRC`: a panel on 1, 2, 4.. ranks: how far apart, how long."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..files.atomic import load_tensors, write_json
from ..files.source import ShardedSource
from ..glm.config import GlmConfig
from ..glm.weights import WeightStore
from ..runtime.launch import run_panel
from ..runtime.panel import Panel
from ..runtime.reference import make_reference


def random_panel(vocabulary: int, windows: int, length: int) -> Panel:
    """Windows of random tokens: what is compared is ranks with ranks, not a model with text."""
    generator = torch.Generator().manual_seed(0)
    return Panel.of("random", torch.randint(vocabulary, (windows, length), generator=generator), ["random"] * windows)


def compare(panel: Panel, one: Path, other: Path) -> dict[str, float]:
    """Greatest difference of logits, mean KL and the share of equal top-1 tokens between two runs' saved logits."""
    worst, kl, same, bits = 0.0, 0.0, 0, True
    for window in range(len(panel.tokens)):
        name = Path("logits") / f"window-{window:05d}.safetensors"
        a, b = (load_tensors(root / name)["logits"] for root in (one, other))
        bits = bits and torch.equal(a, b)
        worst = max(worst, float((a - b).abs().max()))
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
    tokens = panel.token_count
    return {"same_bits": bits, "max_logit_difference": worst, "kl": kl / tokens, "same_top1": same / tokens}


def run(
    checkpoint: Path, source: Path, scratch: Path, worlds: Sequence[int], device: str, length: int
) -> dict[str, Any]:
    store = WeightStore(ShardedSource.open(source), GlmConfig.from_dict(ShardedSource.open(source).config))
    panel = random_panel(store.config.vocab_size, 4, length)
    make_reference(store, panel, scratch / "reference", repeat=False)
    result: dict[str, Any] = {"panel_tokens": panel.token_count, "torch": torch.__version__, "runs": []}
    for dtype in ("float32", "bfloat16"):
        for world in worlds:
            out = scratch / f"{dtype}-{world}"
            done = run_panel(
                checkpoint, panel, scratch / "reference", world, out, device=device, dtype=dtype, save_logits=True
            )
            ranks = [
                {key: rank[key] for key in ("device", "backend", "communication_s", "seconds")} for rank in done.ranks
            ]
            against = compare(panel, scratch / f"{dtype}-{worlds[0]}", out)
            result["runs"].append({"dtype": dtype, "world": world, "against_first": against, "ranks": ranks})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = run(options.checkpoint, options.source, options.scratch, options.worlds, options.device, options.length)
    for entry in result["runs"]:
        spent = " ".join(f"{rank['communication_s']:.3f}/{rank['seconds']:.2f}" for rank in entry["ranks"])
        backend = entry["ranks"][0]["backend"]
        head = f"{entry['dtype']:9} world {entry['world']} {backend:5}"
        print(f"{head} {entry['against_first']} communication/total s: {spent}")
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
