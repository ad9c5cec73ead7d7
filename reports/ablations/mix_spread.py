"""How far a mix of two widths depends on luck: what many seeds give in each domain, drawn in several ways.

    python mix_spread.py W MODEL RECIPE OUT.json VARIANT ...

W: where `keys35 ablate` has scored these variants; RECIPE may name another panel. Scores every expert alone at the
narrower width, the others at the wider one: a mix costs about the sum. Mixes of the first seeds are scored, too, and
tell how well that holds.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from keys35.allocation import neighbours, random_mix
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.runtime.reference import make_reference
from keys35.stages.ablate import encoded_as, score_each, work_folder
from keys35.stages.choice import DRAWS, RANDOM, _paid, typical, widths_on
from keys35.stages.costs import Measured, read_measured
from keys35.stages.job import Job, open_job
from keys35.stages.validate import held_out_panel
from keys35.stages.variants import load_variants

SEEDS, DIRECT = range(200), 8
Widths = list[np.ndarray]


def ways_of(job: Job, measured: Measured) -> dict[str, Callable[[int], Widths]]:
    """The mixes to compare, each as widths of a seed; cheapest: in the domains that were read, of as many draws."""
    budget, candidates, costs = job.recipe.experts.budget, job.recipe.experts.widths, measured.costs_by_domain()
    sizes, average = [len(layer) for layer in costs], typical(costs, candidates, budget)

    def fallback(seed: int) -> Widths:
        return widths_on(replace(job, recipe=job.recipe.model_copy(update={"seed": seed})), measured, RANDOM)[0]

    def cheapest(seed: int) -> Widths:
        mixes = (random_mix(sizes, budget, DRAWS * seed + draw) for draw in range(DRAWS))
        return min(mixes, key=lambda mix: (_paid(costs, mix, candidates) / average).max())

    return {"random": lambda seed: random_mix(sizes, budget, seed), "cheapest": cheapest, "fallback": fallback}


def alone(sizes: list[int], low: int, high: int) -> Iterator[tuple[str, Widths]]:
    """All experts at the wider width, then each in turn at the narrower one."""
    wide = np.full(sum(sizes), high)
    for expert in range(-1, len(wide)):
        yield f"alone {expert}", np.split(np.where(np.arange(len(wide)) == expert, low, wide), np.cumsum(sizes)[:-1])


def spread(job: Job, judge: tuple) -> dict:
    """By way: mean, standard deviation and worst of the seeds against the mean of all random mixes, by domain.

    That mean is exact where a mix costs the sum; the one of five mixes is off by half of their standard deviation.
    """
    measured = read_measured(job)
    ways, (low, high) = ways_of(job, measured), neighbours(job.recipe.experts.budget)
    sets = dict(alone([len(layer) for layer in measured.error], low, high))
    sets |= {f"{way} {seed}": draw(seed) for way, draw in ways.items() for seed in SEEDS[:DIRECT]}
    metrics = score_each(job, sets, judge, Progress())
    domains = list(metrics["alone -1"]["domains"])
    kl = {name: np.array([scored["domains"][domain]["kl"] for domain in domains]) for name, scored in metrics.items()}
    base = kl["alone -1"]
    added = np.stack([kl[f"alone {expert}"] - base for expert in range(sum(len(layer) for layer in measured.error))])
    mean = base + float(high - job.recipe.experts.budget) * added.sum(0)

    def sums(way: str) -> np.ndarray:
        return np.stack([base + (np.concatenate(ways[way](seed)) == low) @ added for seed in SEEDS])

    off = {way: sums(way) / mean - 1 for way in ways}
    noise = off["random"].std(0)
    scored = {way: np.stack([kl[f"{way} {seed}"] for seed in SEEDS[:DIRECT]]) for way in ways}
    wrong = np.concatenate([scored[way] / (mean * (1 + off[way][:DIRECT])) - 1 for way in ways])
    by_way = {way: {"mean": off[way].mean(0).tolist(), "deviation": off[way].std(0).tolist(),
                    "worst": off[way].max(0).tolist(), "a domain worse by more than the random mixes' deviation":
                    float((off[way] > noise).any(1).mean()),
                    "scored": (scored[way] / mean - 1).tolist()} for way in ways}
    return {"domains": domains, "kl of all random mixes": mean.tolist(), "ways": by_way,
            "scored over summed": {"mean": wrong.mean(0).tolist(), "deviation": wrong.std(0).tolist()}}


def main() -> None:
    root, model, recipe, out, *names = sys.argv[1:]
    base, found = load_recipe(recipe), {}
    for variant in load_variants(None, names):
        changed = variant.of(base)
        with open_job(Path(model), encoded_as(changed, base), Path(root) / work_folder(changed, base)) as job:
            panel = held_out_panel(job.source.root, job.config, base)
            judge = panel, make_reference(job.store, panel, Path(root) / f"reference-{panel.fingerprint[:8]}")
            found[variant.name] = spread(replace(job, recipe=changed), judge)
        print(variant.name, found[variant.name], flush=True)
        Path(out).write_text(json.dumps({"variants": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
