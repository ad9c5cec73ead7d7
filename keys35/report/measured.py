"""What a work directory measured, as one JSON value that can travel with the checkpoint: KEYS35_MEASUREMENTS.json.

Read from receipts and allocation.json alone, without the source and without the directory's lock.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from keys35.files.atomic import read_json
from keys35.files.ledger import BEGUN, Workdir

MEASUREMENTS, MAKING = "KEYS35_MEASUREMENTS.json", "KEYS35_MAKING.json"
MEASUREMENTS_FORMAT, MAKING_FORMAT = "keys35-measurements-v1", "keys35-making-v1"
DIGITS = 6
NOT_IN_A_SUMMARY = ("per_window", "confidence")
STARTED = "started"
STEPS = {
    "captured": "calibration passes",
    "saved": "calibration passes",
    "experts": "expert encoding and judging",
    "experts-time": "expert encoding and judging",
    "weighed": "layer weights",
    "sensitivity": "layer weights",
    "allocated": "allocation",
    "dense": "dense linears",
    "dense-time": "dense linears",
    "dense-saved": "dense linears",
    "assembled": "assembly",
}


def measurements(work: Workdir) -> dict[str, Any]:
    """Rows, cost, and proxy error of every expert measured so far, the sets of widths, and the baselines' scores.

    dropped_windows: the calibration text that was left out because its values stopped being finite. cost[e][w] is the
    predicted nats of final KL of expert e at candidate width w, as the allocation used it; beyond: the nats that all
    cost together beyond the sum of that. Both are absent until the layer weights are measured. Holds no times or paths:
    the same job gives the same value.
    """
    layers: dict[str, dict[str, Any]] = {}
    weights, beyond = _domain_weights(work)
    for name, data in _receipts(work, "experts/"):
        layer = str(int(name.split("/")[1].removeprefix("layer-")))
        _append(layers.setdefault(layer, {"widths": data["widths"]}), data, weights.get(layer))
    layers |= _encoded_once(work, layers)
    allocation = _allocation(work)
    for layer, widths in _chosen(allocation).items():
        if str(layer) in layers:
            layers[str(layer)]["chosen"] = widths
    for entry in layers.values():  # a predicted measurement's costs are not its experts', nor those of a part
        if len(entry.get("cost", ())) != len(entry.get("chosen", entry["fit_rows"])):
            entry.pop("cost", None)
    return {
        "format": MEASUREMENTS_FORMAT,
        "layers": {layer: layers[layer] for layer in sorted(layers, key=int)},
        "dense": {layer: errors for layer, errors in _dense(work)},
        "sets": {name: {key: value for key, value in entry.items() if key != "widths"}
                 for name, entry in allocation.get("sets", {}).items()},
        "baselines": _baselines(work, allocation),
        "dropped_windows": dropped_windows(work),
    } | beyond


def dropped_windows(work: Workdir) -> list[dict[str, Any]]:
    """Calibration windows that any layer has left out so far, each with its text and the layer that broke it."""
    found = [item for _, data in _receipts(work, "measure/capture/") for item in data.get("dropped", ())]
    return [item for place, item in enumerate(found) if item not in found[:place]]


def _receipts(work: Workdir, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in work.units():
        if name.startswith(prefix):
            receipt = work.receipt(name)
            if receipt is not None:
                yield name, receipt["data"]


def _encoded_once(work: Workdir, measured: Container[str]) -> dict[str, dict[str, Any]]:
    """Layers whose experts were encoded behind a quantized prefix and never before: those of an MTP layer, unjudged."""
    layers: dict[str, dict[str, Any]] = {}
    for name, data in _receipts(work, "final/"):
        layer = str(int(name.split("/")[1].removeprefix("layer-")))
        if layer not in measured:
            widths = [int(width) for width in data["held"]]  # an MTP layer's one width is whole
            _append(layers.setdefault(layer, {"widths": widths}), data | {"widths": widths}, None)
    return layers


def _append(into: dict[str, Any], data: dict[str, Any], weights: Sequence[float] | None) -> None:
    """Add one unit's experts to their layer's columns."""
    columns: dict[str, Iterable[Any]] = {key: data[key] for key in ("fit_rows", "selection_rows") if key in data}
    proxy = [data["proxy_error"][str(width)] for width in data["widths"]]
    columns["proxy_error"] = [[_short(sum(expert) / len(expert)) for expert in by_width]
                              for by_width in zip(*proxy, strict=True) if all(by_width)]
    if weights is not None and all(data["error"]):
        columns["cost"] = [[_short(sum(w * e for w, e in zip(weights, error, strict=True))) for error in expert]
                           for expert in data["error"]]
    for name, values in columns.items():
        into.setdefault(name, []).extend(values)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _domain_weights(work: Workdir) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Layer -> share times alpha per domain, and what goes beyond it; both empty before the layers are weighed."""
    receipt = work.receipt("measure/sensitivity")
    if receipt is None:
        return {}, {}
    data = receipt["data"]
    shares = [share / sum(data["shares"]) for share in data["shares"]]
    weights = {layer: [share * a for share, a in zip(shares, alpha, strict=True)]
               for layer, alpha in data["alpha"].items()}
    if "beyond" not in data:  # a directory of an earlier version is still reported, though its job is refused
        return weights, {}
    beyond = sum(share * nats for share, nats in zip(shares, data["beyond"], strict=True))
    return weights, {"beyond": _short(beyond)}


def _allocation(work: Workdir) -> dict[str, Any]:
    return read_json(work.path("allocation.json")) if work.receipt("allocate") else {}


def _chosen(allocation: dict[str, Any], name: str = "allocation") -> dict[int, list[int]]:
    if not allocation:
        return {}
    return dict(zip(allocation["layers"], allocation["sets"][name]["widths"], strict=True))


def _dense(work: Workdir) -> Iterator[tuple[str, dict[str, Any]]]:
    """Per layer: how many dense linears, their mean and largest proxy error."""
    last = {name.rpartition("-")[2]: data["proxy_error"] for name, data in _receipts(work, "quantize/shared/")}
    for name, data in _receipts(work, "quantize/dense/"):
        layer = name.rpartition("-")[2]
        errors = list((data["proxy_error"] | last.get(layer, {})).values())
        if errors:
            facts = {"linears": len(errors), "mean": _short(sum(errors) / len(errors)), "max": _short(max(errors))}
            yield str(int(layer)), facts


def _baselines(work: Workdir, allocation: dict[str, Any]) -> dict[str, Any]:
    """Scores of the sets as they are allocated now, with the panel each was judged on; in the allocation's order."""
    scored = {name.partition("/")[2]: data for name, data in _receipts(work, "baselines/")}
    result = {}
    for name in allocation.get("sets", {}):
        widths = {str(layer): row for layer, row in _chosen(allocation, name).items()}
        if name in scored and scored[name]["identity"]["widths"] == widths:
            metrics = {k: v for k, v in scored[name]["metrics"].items() if k not in NOT_IN_A_SUMMARY}
            result[name] = {"panel_sha256": scored[name]["identity"]["panel"], "metrics": metrics}
    return result


def making(work: Workdir, until: str | None = None) -> dict[str, Any]:
    """How long each kind of work took on the wall clock (seconds) and on which machines, from the directory's log.

    Time between two lines belongs to the work that the later one ends; time before a line "started" to nobody.
    """
    seconds: dict[str, float] = {}
    machines: list[dict[str, Any]] = []
    last = None
    for event in work.events():
        if event["event"] == BEGUN:
            continue
        now = datetime.fromisoformat(event["time"]).timestamp()
        if event["event"] == STARTED:
            if "machine" in event and event["machine"] not in machines:
                machines.append(event["machine"])
        elif last is not None:
            step = STEPS.get(event["event"], event["event"])
            seconds[step] = seconds.get(step, 0.0) + now - last
        if event["event"] == until:
            break
        last = now
    rounded = {step: round(value, 1) for step, value in seconds.items()}
    return {"format": MAKING_FORMAT, "seconds": rounded, "machines": machines}


def finished_checkpoint(work: Workdir) -> Path | None:
    """Where the job last assembled its checkpoint, if that is still there."""
    places = [Path(data["out"]) for _, data in _receipts(work, "assemble/")]
    return places[-1] if places and places[-1].is_dir() else None
