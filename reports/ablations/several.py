"""Run an ablation's variants in several processes that share a GPU; what is finished stays, so it may be stopped.

    python several.py PROCESSES WORK MODEL RECIPE [MODEL RECIPE ...] [VARIANTS.toml]

Each model works under WORK/<its folder's name>. Variants that encode alike go to one process, since they share a work
directory. `keys35 ablate MODEL --recipe RECIPE --work WORK/<name> --finished` then writes the table.
"""

import sys
import time
import traceback
from multiprocessing import get_context
from pathlib import Path

from keys35.calibration.text import load_text_set
from keys35.progress import Progress
from keys35.recipe import Recipe, load_recipe
from keys35.runtime.reference import make_reference
from keys35.stages.ablate import ablate, work_folder
from keys35.stages.job import open_job
from keys35.stages.validate import held_out_panel
from keys35.stages.variants import Variant, load_variants

Task = tuple[str, str, Path, list[Variant]]


def work(task: Task) -> None:
    model, recipe, root, variants = task
    for variant in variants:
        begun = time.time()
        try:
            row = ablate(Path(model), load_recipe(recipe), [variant], root, Progress())["variants"][0]
            kl = {name: f"{scored['kl']:.4f}" for name, scored in row["sets"].items()}
            print(f"{time.time() - begun:5.1f}s {root.name}: {variant.group}: {variant.name}: {kl}", flush=True)
        except Exception:
            print(root.name, variant, traceback.format_exc(limit=-3), flush=True)


def refer(task: tuple[str, str, Path]) -> None:
    """The panel's reference, before anybody scores against it."""
    model, recipe, root = task
    base = load_recipe(recipe)
    with open_job(Path(model), base, root / "reference-only") as job:
        make_reference(job.store, held_out_panel(job.source.root, job.config, base), root / "reference")


def tasks_of(model: str, recipe: str, root: Path, lists: list[Path | None]) -> list[Task]:
    base, groups = load_recipe(recipe), {}
    for variant in (variant for path in lists for variant in load_variants(path)):
        if set(variant.of(base).calibration.domains) <= _domains(base):
            groups.setdefault(work_folder(variant.of(base), base), []).append(variant)
    return [(model, recipe, root, variants) for variants in groups.values()]


def _domains(recipe: Recipe) -> set[str]:
    return {domain.name for domain in load_text_set(recipe.calibration.set).domains}


def main() -> None:
    processes, root, *more = sys.argv[1:]
    lists = [None, *(Path(more.pop()) for _ in range(len(more) % 2))]
    pairs = zip(more[::2], more[1::2], strict=True)
    models = [(model, recipe, Path(root) / Path(model).name) for model, recipe in pairs]
    queues = [tasks_of(*model, lists) for model in models]
    order = [queue[place] for place in range(max(map(len, queues))) for queue in queues if place < len(queue)]
    with get_context("spawn").Pool(int(processes)) as pool:
        pool.map(refer, models, chunksize=1)
        for _ in pool.imap_unordered(work, order, chunksize=1):
            pass


if __name__ == "__main__":
    main()
