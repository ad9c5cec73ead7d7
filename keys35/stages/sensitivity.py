"""How much a layer's expert error moves the final KL: one streamed pass with a perturbed copy per layer."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from keys35.calibration.windows import Windows
from keys35.glm.block import LayerWeights
from keys35.glm.stream import Head
from keys35.glm.weights import Keep, Overlay, StoredLayer, WeightStore
from keys35.recipe import Recipe
from keys35.stages.candidates import Candidates, Simulated
from keys35.stages.capture import READERS
from keys35.stages.dropped import dropped_anywhere, left
from keys35.stages.job import Job
from keys35.stages.spans import Spans
from keys35.stages.states import WINDOWS_AT_ONCE_TOKENS, States
from keys35.stages.units import SENSITIVITY, expert_units, is_predicted, middle_width, sensitivity_unit, weighed

LOGIT_ROWS = 256


def sensitivity_parts(selection: Windows, recipe: Recipe) -> range:
    """The pass in parts, each a unit of work: the windows that go through a layer at once.

    A copy per layer makes states a part's largest need, so parts bound memory whatever the number of windows.
    """
    return range(-(-len(_windows(selection, recipe)) // _at_once(recipe)))


def _windows(selection: Windows, recipe: Recipe) -> Windows:
    return selection.head(recipe.calibration.sensitivity_windows)


def _whole(job: Job, selection: Windows) -> Windows:
    """Those that stay finite through all layers; a part may get none of them."""
    return left({"selection": selection}, dropped_anywhere(job))["selection"]


def _at_once(recipe: Recipe) -> int:
    return max(1, WINDOWS_AT_ONCE_TOKENS // recipe.calibration.window)


def propagate_part(job: Job, store: WeightStore, selection: Windows, part: int) -> None:
    """Record a part's KL per layer and domain, in nats summed over its tokens.

    Copy l runs layer l with all its experts at the middle candidate width (a predicted measurement: with some that were
    simulated) and everything else unquantized, so its KL against the unperturbed copy is what that error costs.
    """
    spent = Spans(job.device)
    windows, size = _windows(_whole(job, selection), job.recipe), _at_once(job.recipe)
    rows = slice(part * size, (part + 1) * size)
    windows = Windows(windows.tokens[rows], windows.domain[rows], windows.domains)
    copies = _propagate(job, store, windows, middle_width(job.recipe)[1], spent)
    with spent("judging"):
        head = Head.of_trunk(store)
        kl = {str(layer): _kl_by_domain(head, windows, copies[None], copies[layer]).tolist()
              for layer in job.config.moe_layers}
    job.work.commit(sensitivity_unit(part), [], {"kl": kl})
    job.work.log("weighed", unit=sensitivity_unit(part), seconds=spent.facts())


def conclude_sensitivity(job: Job, selection: Windows) -> None:
    """Record alpha[layer][domain]: nats of final KL per unit of the layer's summed expert error."""
    windows = _windows(_whole(job, selection), job.recipe)
    middle, width = middle_width(job.recipe)
    tokens = torch.bincount(windows.domain, minlength=len(windows.domains)) * windows.tokens.shape[1]
    units = [sensitivity_unit(part) for part in sensitivity_parts(selection, job.recipe)]
    parts = [job.work.require(unit)["data"]["kl"] for unit in units]
    kl, alpha = {}, {}
    for layer in job.config.moe_layers:
        nats = sum(torch.tensor(part[str(layer)], dtype=torch.float64) for part in parts) / tokens
        error = torch.zeros(len(windows.domains), dtype=torch.float64)
        for unit in expert_units(job, layer):
            data = job.work.require(unit.name)["data"]
            known = data.get("simulated") or [of_expert[middle] for of_expert in data["error"]]
            error += sum(torch.tensor(known[unit.experts.index(e)], dtype=torch.float64) for e in weighed(job, unit))
        kl[str(layer)] = nats.tolist()
        alpha[str(layer)] = (nats / error.clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    data = {
        "width": width,
        "windows": len(windows),
        "domains": list(windows.domains),
        "shares": [domain.share for domain in job.text.domains],
        "kl": kl,
        "alpha": alpha,
    }
    job.work.commit(SENSITIVITY, [], data)
    job.work.log("sensitivity", kl=kl)


def _propagate(
    job: Job, store: WeightStore, windows: Windows, width: int, spent: Spans
) -> dict[int | None, States]:
    """Final states of the unperturbed copy (None) and of one copy per MoE layer; each layer is read once.

    While the copies pass a layer, the system reads the next one.
    """
    coming = ThreadPoolExecutor(1, "prefetch")
    start = States.embedded(store, windows.tokens, torch.float32)
    advance = partial(States.advance, config=job.config, device=job.device, at_once=job.tokens_at_once)
    copies: dict[int | None, States] = {None: start}
    for layer in range(job.config.num_hidden_layers):
        with spent("reading"):
            weights, perturbed = _read(job, store, layer, width)
        if job.reads_ahead:
            coming.submit(job.source.prefetch, [rule.source for rule in job.rules.values() if rule.layer == layer + 1])
        with spent("forward"):
            entered = copies[None]
            copies = {name: advance(states, layer=layer, weights=weights) for name, states in copies.items()}
            if perturbed:
                copies[layer] = advance(entered, layer=layer, weights=perturbed)
    coming.shutdown()
    return copies


def _read(job: Job, store: WeightStore, layer: int, width: int) -> tuple[StoredLayer, LayerWeights | None]:
    """A layer, and with perturbed experts if it has any: in memory at once for a GPU, read when asked for on a CPU."""
    weights = store.layer(layer, Keep.PACKED)
    perturbed, hold = None, None
    if layer in job.config.moe_layers and is_predicted(job, layer):
        perturbed = Overlay(weights, Simulated(job, layer))
    elif layer in job.config.moe_layers:
        candidates = Candidates(job, layer)
        perturbed, hold = candidates.overlay(weights, [width] * job.experts), partial(candidates.hold, width)
    if job.device.type == "cuda":
        with ThreadPoolExecutor(1) as beside:
            holding = beside.submit(hold) if hold else None
            weights.load(READERS)
        if holding:
            holding.result()
    return weights, perturbed


def _kl_by_domain(head: Head, windows: Windows, reference: States, copy: States) -> Tensor:
    """KL(reference || copy) in nats summed over tokens, per domain, float64 (domains,)."""
    total = torch.zeros(len(windows.domains), dtype=torch.float64)
    for index, domain in enumerate(windows.domain.tolist()):
        for rows in range(0, reference.x.shape[1], LOGIT_ROWS):
            part = slice(rows, rows + LOGIT_ROWS)
            p = head(reference.x[index, part]).double().log_softmax(-1)
            q = head(copy.x[index, part]).double().log_softmax(-1)
            total[domain] += (p.exp() * (p - q)).sum(-1).sum().cpu()
    return total
