"""Run an ablation's variants in several processes that share a GPU; what is finished stays, so it may be stopped.

    python several.py MODEL RECIPE WORK PROCESSES [VARIANTS.toml]

Variants that encode alike go to one process, since they share a work directory. `keys35 ablate ... --finished` then
writes the table.
"""

import sys
import time
import traceback
from multiprocessing import get_context
from pathlib import Path

from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.runtime.reference import make_reference
from keys35.stages.ablate import Variant, _folder, ablate, load_variants, vary
from keys35.stages.job import open_job
from keys35.stages.validate import held_out_panel


def work(model: str, recipe: str, root: str, variants: list[Variant]) -> None:
    for variant in variants:
        begun = time.time()
        try:
            row = ablate(Path(model), load_recipe(recipe), [variant], Path(root), Progress())["variants"][0]
            random = [s["kl"] for name, s in row["sets"].items() if name.startswith("random-")]
            print(f"{time.time() - begun:5.1f}s {variant.group}: {variant.name}: {row['sets']['allocation']['kl']:.5f} "
                  f"random {sum(random) / len(random):.5f}", flush=True)
        except Exception:
            print(variant, traceback.format_exc(limit=-3), flush=True)


def main() -> None:
    model, recipe, root, processes, *more = sys.argv[1:]
    base = load_recipe(recipe)
    with open_job(Path(model), base, Path(root) / "reference-only") as job:
        panel = held_out_panel(job.source.root, job.config, base)
        make_reference(job.store, panel, Path(root) / "reference")
    groups: dict[str, list[Variant]] = {}
    for variant in [*load_variants(None), *(v for file in more for v in load_variants(Path(file)))]:
        groups.setdefault(_folder(vary(base, variant.changes), base), []).append(variant)
    tasks = [(model, recipe, root, variants) for variants in groups.values()]
    with get_context("spawn").Pool(int(processes)) as pool:
        pool.starmap(work, tasks, chunksize=1)


if __name__ == "__main__":
    main()
