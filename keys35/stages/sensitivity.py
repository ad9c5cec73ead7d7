"""How much a layer's expert error moves the final KL: one streamed pass with a perturbed copy per layer."""

import torch
from torch import Tensor

from keys35.calibration.windows import Windows
from keys35.glm.stream import Head
from keys35.glm.weights import WeightStore
from keys35.stages.candidates import Candidates
from keys35.stages.job import Job
from keys35.stages.states import States
from keys35.stages.units import SENSITIVITY, expert_units

LOGIT_ROWS = 256


def measure_sensitivity(job: Job, store: WeightStore, selection: Windows) -> None:
    """Record alpha[layer][domain]: nats of final KL per unit of the layer's summed expert error.

    Copy l runs layer l with all its experts at the middle candidate width and everything else unquantized, so
    its KL against the unperturbed copy is what that layer's real encoding error costs. alpha is their ratio.
    """
    windows = selection.head(job.recipe.calibration.sensitivity_windows)
    widths = job.recipe.experts.widths
    middle = len(widths) // 2
    copies = _propagate(job, store, windows, widths[middle])
    head = Head.of_trunk(store)
    kl = {layer: _kl_by_domain(head, windows, copies[None], copies[layer]) for layer in job.config.moe_layers}
    alpha = {}
    for layer, nats in kl.items():
        error = torch.zeros(len(windows.domains), dtype=torch.float64)
        for unit in expert_units(job, layer):
            receipt = job.work.receipt(unit.name)
            assert receipt is not None, "sensitivity runs after every layer's experts"
            error += torch.tensor(receipt["data"]["error"], dtype=torch.float64)[:, middle].sum(0)
        alpha[layer] = (nats / error.clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    data = {
        "width": widths[middle],
        "windows": len(windows),
        "domains": list(windows.domains),
        "kl": {str(layer): nats.tolist() for layer, nats in kl.items()},
        "alpha": {str(layer): values for layer, values in alpha.items()},
    }
    job.work.commit(SENSITIVITY, [], data)
    job.work.log("sensitivity", kl=data["kl"])


def _propagate(job: Job, store: WeightStore, windows: Windows, width: int) -> dict[int | None, States]:
    """Final states of the unperturbed copy (None) and of one copy per MoE layer."""
    start = States.embedded(store, windows.tokens)
    copies: dict[int | None, States] = {None: start}
    for layer in range(job.config.num_hidden_layers):
        weights = store.layer(layer)
        entered = copies[None]
        copies = {name: states.advance(job.config, layer, weights, job.device) for name, states in copies.items()}
        if layer in job.config.moe_layers:
            perturbed = Candidates(job, layer).overlay(weights, [width] * job.experts)
            copies[layer] = entered.advance(job.config, layer, perturbed, job.device)
    return copies


def _kl_by_domain(head: Head, windows: Windows, reference: States, copy: States) -> Tensor:
    """Mean KL(reference || copy) in nats per domain, float64 (domains,)."""
    total = torch.zeros(len(windows.domains), dtype=torch.float64)
    for index, domain in enumerate(windows.domain.tolist()):
        for rows in range(0, reference.x.shape[1], LOGIT_ROWS):
            part = slice(rows, rows + LOGIT_ROWS)
            p = head(reference.x[index, part]).double().log_softmax(-1)
            q = head(copy.x[index, part]).double().log_softmax(-1)
            total[domain] += (p.exp() * (p - q)).sum(-1).sum().cpu()
    tokens = torch.bincount(windows.domain, minlength=len(windows.domains)) * reference.x.shape[1]
    return total / tokens
