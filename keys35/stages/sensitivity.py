"""How much a layer's expert error moves the final KL: one streamed pass with a copy of the states per layer.

Errors do not simply add up: others hide part of one, and the KL is no straight line in any of them. So a layer is
weighed where widths are chosen: beside the others' errors at the middle width, by what the KL rises once its own are
twice as large, which is what a bit less makes of them.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from keys35.calibration.windows import Windows
from keys35.glm.stream import Head
from keys35.glm.weights import Keep, Overlay, StoredLayer, WeightStore
from keys35.recipe import Recipe
from keys35.stages.candidates import Candidates, Doubled, Floats, simulated
from keys35.stages.capture import READERS
from keys35.stages.dropped import dropped_anywhere, left
from keys35.stages.job import Job
from keys35.stages.spans import Spans
from keys35.stages.states import WINDOWS_AT_ONCE_TOKENS, States
from keys35.stages.units import SENSITIVITY, expert_units, is_predicted, middle_width, sensitivity_unit, weighed

LOGIT_ROWS = 256
TOGETHER = "together"
LEAST = 0.1  # of an average layer's part of the KL: no layer counts for less


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
    """Record a part's KL by domain, in nats summed over its tokens: of all layers' errors, and with one's doubled.

    Experts are at the middle candidate width (a predicted measurement: some of them, as they were simulated), and all
    else as in the source.
    """
    spent = Spans(job.device)
    windows, size = _windows(_whole(job, selection), job.recipe), _at_once(job.recipe)
    rows = slice(part * size, (part + 1) * size)
    windows = Windows(windows.tokens[rows], windows.domain[rows], windows.domains)
    exact, together, louder = _propagate(job, store, windows, middle_width(job.recipe)[1], spent)
    with spent("judging"):
        head = Head.of_trunk(store)
        kl = {name: _kl_by_domain(head, windows, exact, copy).tolist()
              for name, copy in ({TOGETHER: together} | louder).items()}
    job.work.commit(sensitivity_unit(part), [], {"kl": {str(name): nats for name, nats in kl.items()}})
    job.work.log("weighed", unit=sensitivity_unit(part), seconds=spent.facts())


def conclude_sensitivity(job: Job, selection: Windows) -> None:
    """Record alpha[layer][domain]: nats of final KL per unit of the layer's summed error, beside the others' errors.

    beyond: by domain, what all layers' errors cost together beyond the sum of that.
    """
    windows = _windows(_whole(job, selection), job.recipe)
    middle, width = middle_width(job.recipe)
    tokens = torch.bincount(windows.domain, minlength=len(windows.domains)) * windows.tokens.shape[1]
    units = [sensitivity_unit(part) for part in sensitivity_parts(selection, job.recipe)]
    parts = [job.work.require(unit)["data"]["kl"] for unit in units]

    def mean(name: str) -> Tensor:
        return sum(torch.tensor(part[name], dtype=torch.float64) for part in parts) / tokens.clamp_min(1)

    together, layers = mean(TOGETHER), job.config.moe_layers
    kl, alpha = {}, {}
    for layer in layers:
        # twice an error is four times its square; a few tokens of a domain may seem to gain by it
        nats = torch.maximum((mean(str(layer)) - together) / 3, LEAST * together / len(layers))
        error = torch.zeros(len(windows.domains), dtype=torch.float64)
        for unit in expert_units(job, layer):
            data = job.work.require(unit.name)["data"]
            known = data.get("simulated") or [of_expert[middle] for of_expert in data["error"]]
            error += sum(torch.tensor(known[unit.experts.index(e)], dtype=torch.float64) for e in weighed(job, unit))
        kl[str(layer)] = nats.tolist()
        alpha[str(layer)] = a_unit(nats, error).tolist()
    data = {
        "width": width,
        "windows": len(windows),
        "domains": list(windows.domains),
        "shares": [domain.share for domain in job.text.domains],
        "kl": kl,
        "together": together.tolist(),
        "beyond": (together - torch.tensor(list(kl.values()), dtype=torch.float64).sum(0)).tolist(),
        "alpha": alpha,
    }
    job.work.commit(SENSITIVITY, [], data)
    job.work.log("sensitivity", kl=kl, together=data["together"])


def a_unit(nats: Tensor, error: Tensor) -> Tensor:
    """Nats per unit of a layer's error by domain, float64 (domains,).

    As in all domains together where there is no error: no expert that was perturbed is chosen there. Zeros without any.
    """
    tiny = torch.finfo(torch.float64).tiny
    return torch.where(error > 0, nats / error.clamp_min(tiny), nats.sum() / error.sum() if error.any() else 0.0)


def _propagate(
    job: Job, store: WeightStore, windows: Windows, width: int, spent: Spans
) -> tuple[States, States, dict[int, States]]:
    """Final states without errors, with those of all MoE layers, and with one layer's doubled; each layer is read once.

    While the copies pass a layer, the system reads the next one.
    """
    coming = ThreadPoolExecutor(1, "prefetch")
    advance = partial(States.advance, config=job.config, device=job.device, at_once=job.tokens_at_once)
    exact = together = States.embedded(store, windows.tokens, torch.float32)
    louder: dict[int, States] = {}
    for layer in range(job.config.num_hidden_layers):
        with spent("reading"):
            weights, lossy = _read(job, store, layer, width)
        if job.reads_ahead:
            coming.submit(job.source.prefetch, [rule.source for rule in job.rules.values() if rule.layer == layer + 1])
        with spent("forward"):
            alike, passing = together is exact and lossy is None, weights
            entered = louder if alike else {TOGETHER: together} | louder
            exact = advance(exact, layer=layer, weights=weights)
            if lossy is not None:
                doubled = advance(together, layer=layer, weights=Overlay(weights, Doubled(weights, lossy)))
                passing = Overlay(weights, _in_place_of(weights, lossy, job.device))
            passed = {name: advance(states, layer=layer, weights=passing) for name, states in entered.items()}
            together = passed.pop(TOGETHER, exact)
            louder = passed | ({layer: doubled} if lossy is not None else {})
    coming.shutdown()
    return exact, together, louder


def _in_place_of(weights: StoredLayer, lossy: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Perturbed experts decoded once for all copies, in the memory that the exact ones leave: rounding them to bfloat16
    adds a thousandth to an error at 3 bits."""
    held = {}
    for module in lossy:
        weights.forget(module)
        held[module] = lossy[module].to(device, torch.bfloat16)
    return Floats(held, device)


def _read(job: Job, store: WeightStore, layer: int, width: int) -> tuple[StoredLayer, Mapping[str, Tensor] | None]:
    """A layer, and perturbed experts if it has any: in memory at once for a GPU, read when asked for on a CPU."""
    weights = store.layer(layer, Keep.PACKED)
    lossy, hold = None, None
    if layer in job.config.moe_layers and is_predicted(job, layer):
        lossy = simulated(job, layer)
    elif layer in job.config.moe_layers:
        candidates, widths = Candidates(job, layer), [width] * job.experts
        lossy, hold = candidates.decoded(widths), partial(candidates.hold, widths)
    if job.device.type == "cuda":
        with ThreadPoolExecutor(1) as beside:
            holding = beside.submit(hold) if hold else None
            weights.load(READERS)
        if holding:
            holding.result()
    return weights, lossy


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
