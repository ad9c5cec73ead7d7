"""The best that any widths could do on a panel: every expert scored alone, and the exact optimum of what that says.

    python bound.py W MODEL RECIPE OUT.json

W: where `keys35 ablate` has scored the first variant. Scores each expert alone at the narrowest and at the widest
candidate, all others at the one between: a set of widths costs about the sum (mix_spread.py: within 1 %). The optimum
of those sums, on the text that judges, is what no choice of widths made from other text can beat by more than luck.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from keys35.allocation import exact_allocation
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.runtime.reference import make_reference
from keys35.stages.ablate import encoded_as, score_each, work_folder
from keys35.stages.costs import read_measured
from keys35.stages.job import open_job
from keys35.stages.validate import held_out_panel
from keys35.stages.variants import load_variants

WIDTHS, MEANS = (2, 3, 4), ("9/4", "5/2", "11/4")
MORE = (0.1, 0.2, 0.3, 0.5, 1.0)  # beside its part of the mean


def alone(sizes: Sequence[int]) -> dict[str, list[np.ndarray]]:
    """All experts at 3 bits, and each in turn at 2 and at 4."""
    middle, cuts = np.full(sum(sizes), 3), np.cumsum(sizes)[:-1]
    sets = {"3": np.split(middle, cuts)}
    for expert in range(len(middle)):
        for width in (2, 4):
            sets[f"{expert} at {width}"] = np.split(np.where(np.arange(len(middle)) == expert, width, middle), cuts)
    return sets


def bound(sizes: Sequence[int], kl: Mapping[str, Sequence[float]], costs: Sequence[np.ndarray]) -> dict:
    """kl: mean, then domains, of the sets of `alone`. costs: (experts, widths) of each layer, predicted nats.

    By mean of bits: what all random mixes of 2 and 3 bits have on average, and gains over it: of the optimum; of those
    where the KL of the domain that then gains least counts some more; and of the exact optimum of the predicted costs.
    By layer, the KL between 2 and 3 bits over what costs say of it.
    """
    base, count = np.asarray(kl["3"]), sum(sizes)
    rise = {width: np.stack([kl[f"{expert} at {width}"] for expert in range(count)]) - base for width in (2, 4)}
    true, predicted = np.stack([rise[2], np.zeros_like(rise[2]), rise[4]], 1), np.concatenate(costs)
    layer = np.repeat(np.arange(len(sizes)), sizes)
    found = {}
    for mean in map(Fraction, MEANS):
        random = base + float(3 - mean) * rise[2].sum(0)

        def gains(prices: np.ndarray, mean: Fraction = mean, random: np.ndarray = random) -> list[float]:
            widths = exact_allocation(prices - prices.min(), WIDTHS, mean)
            return (1 - (base + sum(rise[w][widths == w].sum(0) for w in (2, 4))) / random).tolist()

        best = gains(true[:, :, 0])
        least = 1 + int(np.argmin(best[1:]))
        fairer = {str(more): gains(true[:, :, 0] + more * true[:, :, least]) for more in MORE}
        found[str(mean)] = {"kl of all random mixes": random.tolist(), "possible, that domain counting more": fairer,
                            "gain": {"possible": best, "predicted costs": gains(predicted)}}
    said = predicted[:, 0] - predicted[:, 1]
    ratios = [float(rise[2][layer == here, 0].sum() / said[layer == here].sum()) for here in range(len(sizes))]
    return {"means": found, "kl over costs by layer": ratios}


def main() -> None:
    root, model, recipe, out = sys.argv[1:]
    base, variant = load_recipe(recipe), load_variants(None)[0]
    changed = variant.of(base)
    with open_job(Path(model), encoded_as(changed, base), Path(root) / work_folder(changed, base)) as job:
        panel = held_out_panel(job.source.root, job.config, base)
        judge = panel, make_reference(job.store, panel, Path(root) / "reference")
        job = replace(job, recipe=changed)
        measured = read_measured(job)
        sizes = [len(layer) for layer in measured.error]
        scored = score_each(job, alone(sizes), judge, Progress())
    domains = list(scored["3"]["domains"])
    kl = {name: [found["kl"], *(found["domains"][domain]["kl"] for domain in domains)]
          for name, found in scored.items()}
    result = {"domains": domains, **bound(sizes, kl, measured.costs()), "kl": kl}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "kl"})


if __name__ == "__main__":
    main()
