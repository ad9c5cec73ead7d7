"""The unit of work: a group of a layer's routed experts, encoded at some widths and judged at the layer's output."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from keys35.files.ahead import Ahead
from keys35.files.atomic import Saved, save_tensors
from keys35.stages.expert_encoding import LayerRows, PrefixRows, Weights, encode_weights, expert_names, simulate_weights
from keys35.stages.job import Job
from keys35.stages.judging import Judged, decoded, judge
from keys35.stages.spans import Spans
from keys35.stages.unit_files import UnitFiles
from keys35.stages.units import ExpertUnit, is_predicted, middle_width, sampled, weighed

Batch = tuple[int, tuple[int, ...]]  # a layer and some of its experts
Reader = Ahead[dict[int, list[Tensor]]]
READERS = 4


def encode_experts(
    job: Job, unit: ExpertUnit, widths: Sequence[int], keep: Sequence[int], rows: LayerRows, reader: Reader,
    following: ExpertUnit | None = None,
) -> None:
    """Encode a group at each width and commit what it costs; save one file for each width of `keep`.

    The receipt has what `judging.Judged` says, a list of experts for each. A predicted measurement simulates them all,
    at one width, and encodes a few.
    A GPU takes a batch of the group at a time: the next one's weights are read, and the last one's encodings written,
    while it works; behind the last batch the first one of the `following` unit is read.
    """
    spent, chosen = Spans(job.device), sampled(job, unit)
    after = _first_batch(job, following) if following else None
    found, simulated, written = {}, {}, {}
    if is_predicted(job, unit.layer):
        then = _batches(job, unit.layer, chosen)[0] if chosen else after
        simulated, written = _simulate_all(job, unit, rows, spent, reader, then)
    if chosen:
        found, files = _encode_all(job, unit, chosen, widths, keep, rows, spent, reader, after)
        written |= files
    data = _receipt(unit, widths, [found.get(e) or simulated[e] for e in unit.experts])
    data |= {"held": {str(width): chosen for width in keep}}
    if simulated:
        data |= _simulated_facts([simulated[e].judged for e in unit.experts])
    job.work.commit(unit.name, written, data)
    _log(job, unit, spent, len(chosen) * len(widths))


def encode_chosen(
    job: Job, unit: ExpertUnit, chosen: Mapping[int, Sequence[int]], rows: LayerRows, reader: Reader
) -> None:
    """Encode experts of a measured group at the widths chosen for them (width -> experts), and keep those.

    An encoding depends on nothing but its weight, Hessian, name and seed, so these are the bytes that `encode_experts`
    measured and did not keep, or would have measured.
    """
    files, data = job.work.recorded(unit.name), job.work.require(unit.name)["data"]
    spent = Spans(job.device)
    for width, experts, after in _in_turn(job, unit, chosen):
        found, written = _encode_all(job, unit, experts, [width], [width], rows, spent, reader, after)
        files |= written
        for expert, encoded in found.items():
            data["proxy_error"][str(width)][data["experts"].index(expert)] = encoded.proxy_error[0]
            data["fallback"] = sorted({*data["fallback"], *encoded.fallback})
    held = data["held"] | {str(width): list(experts) for width, experts in chosen.items()}
    job.work.commit(unit.name, files, data | {"held": held})
    _log(job, unit, spent, sum(len(experts) for experts in chosen.values()))


def encode_final(
    job: Job, unit: ExpertUnit, chosen: Mapping[int, Sequence[int]], rows: PrefixRows, reader: Reader
) -> None:
    """Encode a group behind the quantized prefix, at the widths chosen (width -> experts); nothing is judged."""
    spent, facts, files = Spans(job.device), {}, {}
    for width, experts, after in _in_turn(job, unit, chosen):
        found, written = _encode_all(job, unit, experts, [width], [width], rows, spent, reader, after)
        files |= written
        facts |= {expert: (width, encoded) for expert, encoded in found.items()}
    proxy = {str(width): [facts[e][1].proxy_error[0] if facts[e][0] == width else None for e in unit.experts]
             for width in chosen}
    in_order = [facts[expert][1] for expert in unit.experts]
    data = {"experts": list(unit.experts), "held": {str(width): list(experts) for width, experts in chosen.items()},
            "fit_rows": [e.fit_rows for e in in_order], "shrink": [e.shrink for e in in_order],
            "proxy_error": proxy, "fallback": sorted(name for e in in_order for name in e.fallback)}
    job.work.commit(unit.name, files, data)
    _log(job, unit, spent, sum(len(experts) for experts in chosen.values()))


def _in_turn(
    job: Job, unit: ExpertUnit, chosen: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, Sequence[int], Batch | None]]:
    """Widths, their experts, and the batch that the next width begins with."""
    firsts = [_batches(job, unit.layer, experts)[0] for experts in chosen.values()]
    for (width, experts), after in zip(chosen.items(), [*firsts[1:], None], strict=True):
        yield width, experts, after


def _log(job: Job, unit: ExpertUnit, spent: Spans, encodings: int) -> None:
    job.work.log("experts-time", unit=unit.name, encodings=encodings, seconds=spent.facts())


def _encode_all(
    job: Job, unit: ExpertUnit, experts: Sequence[int], widths: Sequence[int], keep: Sequence[int],
    rows: LayerRows | PrefixRows, spent: Spans, reader: Reader, after: Batch | None = None,
) -> tuple[dict[int, "Encoded"], dict[Path, Saved]]:
    """Some of a group's experts at some widths, batch by batch; what is to be said of each, and the files of `keep`."""
    found: dict[int, Encoded] = {}
    shape = job.config.hidden_size, job.config.moe_intermediate_size
    shapes = {name: shape[::-1] if name.endswith("down_proj") else shape
              for expert in experts for name in expert_names(unit.layer, expert)}
    batches = _batches(job, unit.layer, experts)
    with UnitFiles({width: unit.file(job, width) for width in keep}, shapes) as files:
        for batch, then in zip(batches, [*batches[1:], after], strict=True):
            with spent("reading"):
                weights = {expert: _on_device(job, parts) for expert, parts in reader.take(batch, then).items()}
            found |= _encode_batch(job, unit.layer, weights, widths, rows, files, spent)
        with spent("writing"):
            return found, files.finish()


def _simulate_all(
    job: Job, unit: ExpertUnit, rows: LayerRows, spent: Spans, reader: Reader, after: Batch | None
) -> tuple[dict[int, "Encoded"], dict[Path, str]]:
    """A group's experts as an encoding at the middle width would be, batch by batch; and the file of some of them."""
    found, kept = {}, {}
    width, batches = middle_width(job.recipe)[1], _batches(job, unit.layer, unit.experts)
    for batch, then in zip(batches, [*batches[1:], after], strict=True):
        with spent("reading"):
            weights = {expert: _on_device(job, parts) for expert, parts in reader.take(batch, then).items()}
        lossy, facts = simulate_weights(job, unit.layer, weights, width, rows, spent)
        with spent("judging"):
            judged = judge(weights, lambda expert, _, lossy=lossy: lossy[expert], [width], rows)
        found |= {expert: Encoded(*facts[expert], judged[expert], None, []) for expert in weights}
        kept |= {name: part.bfloat16().cpu() for expert in weights if expert in weighed(job, unit)
                 for name, part in zip(expert_names(unit.layer, expert), lossy[expert], strict=True)}
    with spent("writing"):
        return found, {unit.simulated_file(job): save_tensors(unit.simulated_file(job), kept)} if kept else {}


@dataclass(frozen=True)
class Encoded:
    """What a receipt says of one expert; proxy errors are (widths, projections), None if it was only simulated.

    judged: None if its rows are not to be looked at.
    """

    fit_rows: int
    shrink: float
    judged: Judged | None
    proxy_error: list[list[float]] | None
    fallback: list[str]


def _batches(job: Job, layer: int, experts: Sequence[int]) -> list[Batch]:
    """Experts as they advance through the encoder together, in the order in which they are written."""
    order = sorted(experts, key=str)
    pair = 2 * job.config.hidden_size * job.config.moe_intermediate_size
    most = max(1, job.encode_options.stack_elements // pair)
    return [(layer, tuple(order[first : first + most])) for first in range(0, len(order), most)]


def _first_batch(job: Job, unit: ExpertUnit) -> Batch:
    """What measuring a unit begins with."""
    return _batches(job, unit.layer, unit.experts if is_predicted(job, unit.layer) else sampled(job, unit))[0]


class Shelf:
    """What a worker finds ready in this process: a layer's rows, and batches of experts that were read before."""

    def __init__(self, job: Job) -> None:
        self.rows: dict[int, LayerRows | PrefixRows] = {}
        self.reader: Reader = Ahead(partial(_read_batch, job, job.device.type == "cuda"))

    def expect(self, job: Job, unit: ExpertUnit) -> None:
        """Begin to read what a unit begins with."""
        self.reader.begin(_first_batch(job, unit))


def _read_batch(job: Job, pinned: bool, batch: Batch) -> dict[int, list[Tensor]]:
    """Experts' projections as the source has them; in pinned memory where a GPU will fetch them."""
    layer, experts = batch
    names = [f"{name}.weight" for expert in experts for name in expert_names(layer, expert)]
    with ThreadPoolExecutor(READERS) as pool:
        read = list(pool.map(partial(job.source.read, pinned=pinned), names))
    return {expert: read[3 * place : 3 * place + 3] for place, expert in enumerate(experts)}


def _on_device(job: Job, parts: Sequence[Tensor]) -> Weights:
    return tuple(part.to(job.device, non_blocking=True).float().T.contiguous() for part in parts)


def _encode_batch(
    job: Job, layer: int, weights: dict[int, Weights], widths: Sequence[int],
    rows: LayerRows | PrefixRows, files: UnitFiles, spent: Spans,
) -> dict[int, Encoded]:
    encoded, facts = encode_weights(job, layer, weights, widths, rows, spent)
    for name in (name for expert in weights for name in expert_names(layer, expert)):
        for width in files.widths:
            files.give(name, encoded[name, width])
    with spent("judging"):
        judged = judge(weights, decoded(layer, encoded), widths, rows) if isinstance(rows, LayerRows) else {}
    return {
        expert: Encoded(
            *facts[expert],
            judged.get(expert),
            [[encoded[name, width].proxy_error for name in expert_names(layer, expert)] for width in widths],
            [name for name in expert_names(layer, expert) if encoded[name, widths[0]].fallback],
        )
        for expert in weights
    }


def _simulated_facts(found: Sequence[Judged]) -> dict[str, object]:
    """Errors at the simulated width, by domain, then by half and domain."""
    by_half = [[half[0] for half in judged.error_by_half] for judged in found]
    return {"simulated": [judged.error[0] for judged in found], "simulated_by_half": by_half}


def _receipt(unit: ExpertUnit, widths: Sequence[int], experts: Sequence[Encoded]) -> dict[str, object]:
    return {
        "experts": list(unit.experts),
        "widths": list(widths),
        "fit_rows": [e.fit_rows for e in experts],
        "shrink": [e.shrink for e in experts],
        "selection_rows": [e.judged.rows for e in experts],
        "error": [e.proxy_error and e.judged.error for e in experts],
        "error_se": [e.proxy_error and e.judged.error_se for e in experts],
        "error_by_half": [e.proxy_error and e.judged.error_by_half for e in experts],
        "energy": [e.judged.energy for e in experts],
        "energy_by_half": [e.judged.energy_by_half for e in experts],
        "proxy_error": {str(width): [e.proxy_error and e.proxy_error[i] for e in experts]
                        for i, width in enumerate(widths)},
        "fallback": sorted(name for e in experts for name in e.fallback),
    }
