"""Explain: why one expert has the width it has, from the receipts alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keys35.errors import BudgetError
from keys35.files.atomic import read_json
from keys35.stages.allocate import ALLOCATION, load_allocation
from keys35.stages.choice import EXPERTS, RANDOM
from keys35.stages.costs import Measured, read_measured
from keys35.stages.job import Job
from keys35.stages.units import expert_units

GROUNDS = {
    RANDOM: "None of this decided its width: widths are a random mix, for the reason that `keys35 allocate` warns of.",
    "layers": "Its layer has one width, by what all of its experts cost together.",
}


@dataclass(frozen=True)
class Explanation:
    """One expert among all. Costs are predicted nats of final KL; ranks count from 1, the dearest.

    basis: what its width goes by: "experts" (costs of each), "layers" (of its layer as a whole) or "random".
    cost, error_se: per candidate width (error_se as a share of the cost; None: predicted, or no held-out token chose
    it). by_domain: width -> domain -> nats. saving: nats per bit from the chosen width to the next wider one, domains
    weighted as the allocation had them; paid: the least saving of that kind that was bought where it could have been
    spent; both None at the widest width, and where experts' costs are not what decides.
    """

    layer: int
    expert: int
    width: float
    basis: str
    fit_rows: int
    selection_rows: int
    shrink: float
    energy_share: float
    cost: dict[str, float]
    error_se: dict[str, float | None]
    by_domain: dict[str, dict[str, float]]
    rank_in_layer: int
    rank_in_model: int
    saving: float | None
    paid: float | None


def explain(job: Job, layer: int, expert: int) -> Explanation:
    """Everything that decided an expert's width; raises BudgetError for an expert that has no allocated width."""
    allocation, measured = load_allocation(job), read_measured(job)
    if layer not in allocation or not 0 <= expert < job.experts:
        raise BudgetError(f"layer {layer} has no allocated expert {expert}: layers {measured.layers[0]} to "
                          f"{measured.layers[-1]}, experts 0 to {job.experts - 1}")
    unit = next(unit for unit in expert_units(job, layer) if expert in unit.experts)
    data = job.work.require(unit.name)["data"]
    place, row = data["experts"].index(expert), measured.layers.index(layer)
    names = [str(width) for width in measured.widths]
    costs, parts = measured.costs(), measured.costs_by_domain()[row][expert]
    domains = [domain.name for domain in job.text.domains]
    first = np.concatenate([layer_costs[:, 0] for layer_costs in costs])
    mine = costs[row][expert, 0]
    choice = read_json(job.work.path(ALLOCATION))["choice"]
    basis = "layers" if job.recipe.output.profile == "uniform-layer" else EXPERTS
    basis = RANDOM if choice["basis"] == RANDOM else basis
    weighted = [of_layer @ np.array(choice["domain_weights"]) for of_layer in measured.costs_by_domain()]
    within = [row] if job.recipe.experts.scope == "layer" else range(len(measured.layers))
    saving, paid = _margins(measured, weighted, allocation, (row, expert), within) if basis == EXPERTS else (None, None)
    return Explanation(
        layer, expert, allocation[layer][expert], basis, data["fit_rows"][place], data["selection_rows"][place],
        data["shrink"][place], float(measured.energy[row][expert].sum() / measured.energy[row].sum()),
        dict(zip(names, costs[row][expert].tolist(), strict=True)),
        dict(zip(names, _spread(measured, row, data, place), strict=True)),
        {name: dict(zip(domains, by.tolist(), strict=True)) for name, by in zip(names, parts, strict=True)},
        int((costs[row][:, 0] > mine).sum()) + 1, int((first > mine).sum()) + 1, saving, paid,
    )


def _spread(measured: Measured, row: int, data: Mapping[str, Any], place: int) -> list[float | None]:
    """The standard error of an expert's cost at each width, as a share of it."""
    if data["error"][place] is None or not data["selection_rows"][place]:
        return [None] * len(measured.widths)
    nats = measured.share * measured.alpha[row]
    cost, spread = (np.asarray(data[key][place]) * nats for key in ("error", "error_se"))
    return (np.sqrt(np.square(spread).sum(axis=1)) / np.maximum(cost.sum(axis=1), np.finfo(float).tiny)).tolist()


def _margins(
    measured: Measured, costs: list[np.ndarray], allocation: dict[int, list[float]], mine: tuple[int, int],
    within: Iterable[int],
) -> tuple[float | None, float | None]:
    """Nats per bit that widening this expert would save, and the least that any widening in some layers saved."""
    widths, bought, own = measured.widths, [], None
    for index in within:
        for other, width in enumerate(allocation[measured.layers[index]]):
            at, cost = widths.index(width), costs[index][other]
            if at:
                bought.append((cost[at - 1] - cost[at]) / (widths[at] - widths[at - 1]))
            if (index, other) == mine and at + 1 < len(widths):
                own = float((cost[at] - cost[at + 1]) / (widths[at + 1] - widths[at]))
    return own, float(min(bought)) if bought and own is not None else None


def sentences(found: Explanation) -> list[str]:
    """The explanation for people."""
    lines = [
        f"Layer {found.layer}, expert {found.expert}: {found.width} bits. Of its layer's experts the "
        f"{found.rank_in_layer}. dearest, of the model's the {found.rank_in_model}.",
        f"Fitted on {found.fit_rows:,} rows of its own, {found.shrink:.0%} from all tokens; judged on "
        f"{found.selection_rows:,} rows; {found.energy_share:.1%} of the layer's routed output.",
    ]
    for name, cost in found.cost.items():
        domains = ", ".join(f"{domain} {nats:.2e}" for domain, nats in found.by_domain[name].items())
        spread = found.error_se[name]
        known = "predicted from a simulated encoding" if spread is None else f"error known to {spread:.0%}"
        known = known if found.selection_rows else "no held-out token chose it"
        lines.append(f"{name} bits cost {cost:.2e} nats of KL ({domains}), {known}.")
    if found.basis != EXPERTS:
        lines.append(GROUNDS[found.basis])
    if found.saving is not None and found.paid is not None:
        lines.append(f"The next wider width would save {found.saving:.2e} nats a bit; the least that was paid for "
                     f"elsewhere saves {found.paid:.2e}.")
    return lines
