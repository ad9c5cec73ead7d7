"""A quantized prefix under the allocation and under random mixes, each encoded behind its own prefix; KL of each.

    python prefix_mixes.py PROCESSES WORK MODEL RECIPE OUT.json [RECIPE-KEY=JSON-VALUE ...]

What `keys35 ablate` cannot say of this option: it scores mixes as they were measured, behind the source's prefix. One
measurement serves all; a mix that is done stays done.
"""

import json
import shutil
import sys
import time
from multiprocessing import get_context
from pathlib import Path

from keys35.progress import Progress
from keys35.recipe import Recipe, load_recipe
from keys35.runtime.panel import Panel
from keys35.runtime.ranks import Ranks
from keys35.runtime.reference import Reference, make_reference
from keys35.runtime.score import score_panel
from keys35.stages.allocate import ALLOCATION, allocate, allocation_sets, load_allocation
from keys35.stages.candidates import MixStore
from keys35.stages.job import Job, open_job
from keys35.stages.measure import measure
from keys35.stages.quantize_in_order import quantize_in_order
from keys35.stages.validate import held_out_panel
from keys35.stages.variants import vary
from keys35.stages.workers import Workers

OURS = "allocation"


def recipe_of(name: str, changes: list[str]) -> Recipe:
    pairs = (change.split("=", 1) for change in changes)
    return vary(load_recipe(name), {"encoder.prefix": "quantized"} | {key: json.loads(value) for key, value in pairs})


def judge_of(job: Job, root: Path) -> tuple[Panel, Reference]:
    panel = held_out_panel(job.source.root, job.config, job.recipe)
    return panel, make_reference(job.store, panel, root / "reference")


def prepare(model: str, recipe: str, changes: list[str], root: Path) -> list[str]:
    """Measure and allocate; the names of the sets."""
    with open_job(Path(model), recipe_of(recipe, changes), root / "measured") as job:
        judge_of(job, root)
        measure(job, Progress())
        allocate(job)
        sets = allocation_sets(job.work.path(ALLOCATION))
    return [name for name in sets if name == OURS or name.startswith("random-")]


def score(task: tuple[str, str, list[str], Path, str]) -> tuple[str, dict]:
    """Encode one set behind its own prefix and score it."""
    model, recipe, changes, root, name = task
    begun, work, row = time.time(), root / name, root / f"{name}.json"
    if row.exists():
        return name, json.loads(row.read_text())
    if not work.exists():
        shutil.copytree(root / "measured", root / f"{name}.partial", dirs_exist_ok=True)
        (root / f"{name}.partial").rename(work)
    with open_job(Path(model), recipe_of(recipe, changes), work) as job:
        widths = load_allocation(job, name)
        quantize_in_order(job, Progress(), Workers(), widths)
        found = score_panel(MixStore(job, widths, final=True), Ranks(), *judge_of(job, root))
    facts = {"kl": found["kl"], "domains": {domain: part["kl"] for domain, part in found["domains"].items()},
             "top1": found["top1"], "seconds": round(time.time() - begun, 1)}
    row.write_text(json.dumps(facts))
    return name, facts


def main() -> None:
    processes, root, model, recipe, out, *changes = sys.argv[1:]
    names, rows = prepare(model, recipe, changes, Path(root)), {}
    with get_context("spawn").Pool(int(processes)) as pool:
        for name, facts in pool.imap_unordered(score, [(model, recipe, changes, Path(root), name) for name in names]):
            rows[name] = facts
            print(name, facts, flush=True)
            Path(out).write_text(json.dumps({"changes": changes, "sets": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
