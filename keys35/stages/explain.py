"""Explain: why one expert has the width it has, from the receipts alone."""

from dataclasses import dataclass

import numpy as np

from keys35.errors import BudgetError
from keys35.stages.allocate import load_allocation
from keys35.stages.costs import Measured, read_measured
from keys35.stages.job import Job
from keys35.stages.units import expert_units


@dataclass(frozen=True)
class Explanation:
    """One expert among all. Costs are predicted nats of final KL; ranks count from 1, the dearest.

    cost, error_se: per candidate width (error_se relative to the error, over domains; None: predicted). by_domain:
    width -> domain -> nats. saving: nats per bit from the chosen width to the next wider one; paid: the least saving of
    that kind that was bought anywhere; both None at the widest width.
    """

    layer: int
    expert: int
    width: float
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
    encoded = data["error"][place] is not None
    spread = np.asarray(data["error_se"][place]) / np.maximum(data["error"][place], 1e-300) if encoded else None
    first = np.concatenate([layer_costs[:, 0] for layer_costs in costs])
    mine = costs[row][expert, 0]
    saving, paid = _margins(measured, costs, allocation, row, expert)
    return Explanation(
        layer, expert, allocation[layer][expert], data["fit_rows"][place], data["selection_rows"][place],
        data["shrink"][place], float(measured.energy[row][expert].sum() / measured.energy[row].sum()),
        dict(zip(names, costs[row][expert].tolist(), strict=True)),
        dict(zip(names, spread.mean(axis=1).tolist() if encoded else [None] * len(names), strict=True)),
        {name: dict(zip(domains, by.tolist(), strict=True)) for name, by in zip(names, parts, strict=True)},
        int((costs[row][:, 0] > mine).sum()) + 1, int((first > mine).sum()) + 1, saving, paid,
    )


def _margins(
    measured: Measured, costs: list[np.ndarray], allocation: dict[int, list[float]], row: int, expert: int
) -> tuple[float | None, float | None]:
    """Nats per bit that widening this expert would save, and the least that any widening saved."""
    widths, bought, own = measured.widths, [], None
    for index, layer in enumerate(measured.layers):
        for other, width in enumerate(allocation[layer]):
            at, cost = widths.index(width), costs[index][other]
            if at:
                bought.append((cost[at - 1] - cost[at]) / (widths[at] - widths[at - 1]))
            if (index, other) == (row, expert) and at + 1 < len(widths):
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
        lines.append(f"{name} bits cost {cost:.2e} nats of KL ({domains}), {known}.")
    if found.saving is not None and found.paid is not None:
        lines.append(f"The next wider width would save {found.saving:.2e} nats a bit; the least that was paid for "
                     f"elsewhere saves {found.paid:.2e}.")
    return lines
