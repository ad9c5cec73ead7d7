"""What measure found, as numbers: errors, energies and layer weights, and the costs they come to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keys35.allocation import rank_correlation
from keys35.errors import ResumeError
from keys35.exl3.scale import rounding_error
from keys35.stages.job import Job
from keys35.stages.units import SENSITIVITY, expert_units, middle_width

Errors = list[list[list[float]] | None]  # (widths, domains) of each expert of a layer, None where not encoded
POOL = 4


@dataclass(frozen=True)
class Measured:
    """Measured errors per MoE layer. error[l]: (experts, widths, domains), g^2 |f - f_K|^2 per selection token.

    energy[l]: (experts, domains), the same of g^2 |f|^2. routed[l]: (experts,), calibration tokens that reached each.
    alpha[l]: (domains,), nats of final KL per unit of the layer's summed error. share: (domains,), sums to 1.
    beyond: (domains,), nats that all errors cost together beyond the sum of that; the same for all widths.
    """

    layers: tuple[int, ...]
    widths: tuple[int, ...]
    error: tuple[np.ndarray, ...]
    energy: tuple[np.ndarray, ...]
    alpha: tuple[np.ndarray, ...]
    share: np.ndarray
    routed: tuple[np.ndarray, ...]
    beyond: np.ndarray

    def costs_by_domain(self) -> list[np.ndarray]:
        """(experts, widths, domains) per layer: predicted nats of final KL, each domain's part of the mean."""
        return [e * (self.share * a) for e, a in zip(self.error, self.alpha, strict=True)]

    def costs(self) -> list[np.ndarray]:
        """(experts, widths) per layer: predicted nats of final KL."""
        return [layer.sum(axis=2) for layer in self.costs_by_domain()]

    def predicted_kl(self, chosen: Sequence[Sequence[float | None]]) -> float:
        """Nats of final KL of widths per layer and expert, None for one as in the source; nothing else is quantized."""
        column = {width: index for index, width in enumerate(self.widths)}
        paid = sum(layer[expert, column[width]] for layer, row in zip(self.costs(), chosen, strict=True)
                   for expert, width in enumerate(row) if width is not None)
        return float(paid + self.share @ self.beyond)

    def costs_by_energy(self) -> list[np.ndarray]:
        """As `costs`, but from the output's energy and the share of it that a layer's first expert with any lost."""
        costs = []
        for error, energy, alpha in zip(self.error, self.energy, self.alpha, strict=True):
            first = int((energy.sum(axis=1) > 0).argmax())  # no held-out token may have reached those before it
            lost = error[first].sum(axis=1) / max(energy[first].sum(), np.finfo(float).tiny)
            costs.append((energy * (self.share * alpha)).sum(axis=1)[:, None] * lost)
        return costs

    def costs_by_use(self) -> list[np.ndarray]:
        """A layer's `costs` divided among its experts as the calibration text uses them, and the other way round.

        (experts, widths, 2) per layer. The other way round: by the tokens that an expert lacks of twice the mean.
        Routers are trained to even loads out, so that text which was not read uses what this text leaves.
        """
        divided = []
        for layer, tokens in zip(self.costs(), self.routed, strict=True):
            use = np.stack([tokens, np.maximum(2 * tokens.mean() - tokens, 0)], axis=1)
            divided.append(layer.sum(axis=0)[:, None] * (use / np.maximum(use.sum(axis=0), 1))[:, None, :])
        return divided

    def plain_errors(self) -> list[np.ndarray]:
        """(experts, widths) per layer without layer weights: errors only, as if layers were comparable."""
        return [(e * self.share).sum(axis=2) for e in self.error]


def read_measured(job: Job, half: int | None = None) -> Measured:
    """Collect the receipts of `measure`, errors from all selection windows or from half of them (0 or 1).

    Raises ResumeError naming the first unit that is missing.
    """
    layers = tuple(job.config.moe_layers)
    known, energies, simulated, routed = zip(*(_of_layer(job, layer, half) for layer in layers), strict=True)
    ratios = _ratios(known, simulated, _usual(job))
    errors = [_completed(*of_layer) for of_layer in zip(known, simulated, ratios, strict=True)]
    receipt = job.work.receipt(SENSITIVITY)
    if receipt is None:
        raise _unmeasured(job, SENSITIVITY)
    alpha = tuple(np.asarray(receipt["data"]["alpha"][str(layer)], dtype=np.float64) for layer in layers)
    share = np.array([domain.share for domain in job.text.domains])
    share, beyond = share / share.sum(), np.asarray(receipt["data"]["beyond"], dtype=np.float64)
    return Measured(layers, job.recipe.experts.widths, tuple(errors), energies, alpha, share, routed, beyond)


def _of_layer(job: Job, layer: int, half: int | None) -> tuple[Errors, np.ndarray, np.ndarray, np.ndarray]:
    """Errors (widths, domains) of a layer's experts, None where not encoded; energies and simulated errors (experts,
    domains), of which a full measurement has none; tokens of both splits that reached each, whatever the half."""
    errors, energies, simulated, routed = [], [], [], []
    for unit in expert_units(job, layer):
        receipt = job.work.receipt(unit.name)
        if receipt is None:
            raise _unmeasured(job, unit.name)
        data = receipt["data"]
        routed += [fit + selection for fit, selection in zip(data["fit_rows"], data["selection_rows"], strict=True)]
        if half is None:
            errors, energies = errors + data["error"], energies + data["energy"]
            simulated += data.get("simulated", [])
        else:
            errors += [by_half and by_half[half] for by_half in data["error_by_half"]]
            energies += [by_half[half] for by_half in data["energy_by_half"]]
            simulated += [by_half[half] for by_half in data.get("simulated_by_half", [])]
    return errors, *(np.asarray(found, dtype=np.float64) for found in (energies, simulated, routed))


def _ratios(known: Sequence[Errors], simulated: Sequence[np.ndarray], usual: np.ndarray) -> list[np.ndarray]:
    """(widths,) per layer: errors of its encoded experts at each width to their simulated ones.

    A few experts say little of their layer, and layers are about alike: the fewer they are, the more the mean over the
    layers counts, as POOL experts more would. One that no held-out token chose says nothing; where that is all of them,
    ratios are the usual ones (widths,).
    """
    ratios, counts = [], []
    for errors, drawn in zip(known, simulated, strict=True):
        found = _compared(errors, drawn)
        lost = [errors[number] for number in found]
        ratios.append(np.sum(lost, axis=(0, 2)) / drawn[found].sum() if found else usual)
        counts.append(len(found))
    mean = np.mean([own for own, count in zip(ratios, counts, strict=True) if count] or [usual], axis=0)
    return [(count * own + POOL * mean) / (count + POOL) for own, count in zip(ratios, counts, strict=True)]


def _compared(errors: Errors, drawn: np.ndarray) -> list[int]:
    """Experts of a layer that were both simulated and encoded, and that a held-out token chose."""
    return [number for number, simulated in enumerate(drawn) if errors[number] is not None and simulated.any()]


def _usual(job: Job) -> np.ndarray:
    """(widths,): the search's errors to that at the width of simulations, if weights were Gaussian."""
    errors = np.array([rounding_error(width) for width in job.recipe.experts.widths])
    return errors / errors[middle_width(job.recipe)[0]]


def _completed(errors: Errors, simulated: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """(experts, widths, domains): where an error is not known, the simulated one times what such ones come to."""
    if None not in errors:
        return np.asarray(errors, dtype=np.float64)
    result = simulated[:, None, :] * ratios[:, None]
    for number, error in enumerate(errors):
        if error is not None:
            result[number] = error
    return result


def prediction_check(job: Job) -> dict[str, float | None] | None:
    """How well simulation ranks the experts that a predicted measurement did encode; None if it is none.

    All domains together at the narrowest width, over the whole model, of those that a held-out token chose. apart: how
    far errors over simulated ones lie from their mean, a standard deviation as a share of it. None for fewer than two.
    """
    if job.recipe.experts.measure == "encoded":
        return None
    found = []
    for layer in job.config.moe_layers:
        errors, _, drawn, _ = _of_layer(job, layer, None)
        found += [(float(np.sum(errors[e][0])), float(drawn[e].sum())) for e in _compared(errors, drawn)]
    if len(found) < 2:
        return {"experts": len(found), "rank_correlation": None, "apart": None}
    error, simulated = np.array(found).T
    ratio = error / simulated
    return {"experts": len(found), "rank_correlation": rank_correlation(error, simulated),
            "apart": float(ratio.std() / ratio.mean())}


def _unmeasured(job: Job, unit: str) -> ResumeError:
    return ResumeError(f"{job.work.root}: '{unit}' is not measured yet: run `keys35 measure` on this directory first")
