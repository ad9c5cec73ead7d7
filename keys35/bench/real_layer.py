"""`python -m keys35.bench.real_layer DIR`: one MoE layer of GLM-5.3's true size through the real stages, timed.

The slice (keys35/bench/slice.py) goes through measure at all widths, allocate, quantize, assemble and check. A piece
that is cut off, by `timeout 540` say, is resumed by the same command. Writes JSON and prints where the time went, with
what that means for all of GLM-5.3.
"""

import argparse
import datetime
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keys35 import __version__
from keys35.bench.slice import Shape, write_slice
from keys35.bench.standin import GLM_5_3
from keys35.files.atomic import read_json, write_json
from keys35.glm.config import GlmConfig
from keys35.progress import Progress, Tick
from keys35.recipe import Recipe, load_recipe
from keys35.report.machine import machine
from keys35.runtime.rank import peak_rss_bytes
from keys35.stages.allocate import allocate
from keys35.stages.assemble import assemble
from keys35.stages.capture import calibration_windows
from keys35.stages.check import check
from keys35.stages.job import Job, open_job
from keys35.stages.measure import measure
from keys35.stages.needs import rows_windows
from keys35.stages.projection import project
from keys35.stages.quantize import quantize
from keys35.stages.units import MEASURED, capture_unit, expert_units

KINDS = ("reading", "forward", "Hessians", "encode", "judging", "writing", "simulation")
SAMPLE = 12


def recipe_of(options: argparse.Namespace, text: Path) -> Recipe:
    """GLM-5.3's recipe on the slice's own text."""
    return Recipe.model_validate({
        "name": "real-layer",
        "experts": {
            "widths": [2, 3, 4], "bits": 2.75, "group": options.group,
            "measure": "predicted" if options.predicted else "encoded", "sample": 128,
        },
        "dense": {"bits": 5},
        "calibration": {
            "set": str(text), "window": options.window, "sensitivity_windows": 4, "states": "bfloat16",
            "fit_windows": options.fit, "selection_windows": options.selection,
            "simulation_windows": options.fit // 4,
        },
        "encoder": {"low_memory": options.low_memory, "prefix": options.prefix},
        "output": {"shards": 3},
    })  # fmt: skip


def measured_like(recipe: Recipe) -> Recipe:
    """A recipe whose layers take what the measured one did: all encoded at all widths, behind the source's prefix."""
    experts = recipe.experts.model_copy(update={"measure": "encoded"})
    return recipe.model_copy(update={"experts": experts,
                                     "encoder": recipe.encoder.model_copy(update={"prefix": "source"})})


def run_piece(options: argparse.Namespace, say: Callable[[str], None]) -> Job:
    """Make the slice if it is not there, then do what is left of the job; stages' seconds go to the work's log."""
    root, made = options.directory, options.directory / "slice.json"
    if not made.exists():
        shutil.rmtree(root, ignore_errors=True)
        begun = time.perf_counter()
        tokens = (options.fit + options.selection) * options.window
        text = write_slice(root, options.shape, max(3 * tokens, 8 * options.selection * options.window))
        write_json(made, {"text": str(text), "seconds": time.perf_counter() - begun})
        say(f"slice: made in {time.perf_counter() - begun:.0f} s")
    recipe = recipe_of(options, Path(read_json(made)["text"]))
    with open_job(root / "source", recipe, root / "work") as job:
        progress = Progress(job.work, lambda tick: say(_line(tick)))
        with _staged(job, "windows"):
            calibration_windows(job)
        if options.read_ahead and capture_unit(0) not in job.work.units():
            with _staged(job, "read ahead"):
                job.source.prefetch(rule.source for rule in job.rules.values() if rule.layer == 0)
        with _staged(job, "measure"):
            measure(job, progress)
        with _staged(job, "allocate"):
            allocate(job)
        with _staged(job, "quantize"):
            quantize(job, progress)
        with _staged(job, "assemble"):
            assemble(job, root / "out", progress)
        with _staged(job, "check"):
            found = check(root / "out", reference=root / "source", sample=SAMPLE)
        for finding in found.findings:
            say(f"check: {finding}")
        job.work.log("checked", findings=[str(finding) for finding in found.findings], mean=str(found.routed_mean))
    return job


@contextmanager
def _staged(job: Job, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        job.work.log("staged", stage=name, seconds=round(time.perf_counter() - begun, 3), host=peak_rss_bytes())


def _line(tick: Tick) -> str:
    return f"{tick.stage} {tick.done}/{tick.total} {tick.note} ({tick.updated - tick.started:.0f} s)"


def figures(job: Job) -> dict[str, Any]:
    """What the log and the receipts say about the layer."""
    events = job.work.events()
    stages: Counter[str] = Counter()
    for event in events:
        if event["event"] == "staged":
            stages[event["stage"]] += event["seconds"]
    timed = [event["seconds"] for event in events if isinstance(event.get("seconds"), dict)]
    kinds = _by_kind(timed)
    units = [event for event in events if event["event"] == "experts-time"]
    layer = sum(stages[stage] for stage in ("measure", "allocate", "quantize"))
    whole = layer + stages["assemble"] + stages["check"]
    receipts = [job.work.require(unit.name)["data"] for unit in expert_units(job, 0)]
    expert = 3 * job.config.hidden_size * job.config.moe_intermediate_size
    widths = job.recipe.experts.widths
    encode = sum(unit["seconds"].get("encode", 0.0) for unit in units)
    encodings = sum(unit["encodings"] for unit in units)
    checked = next(event for event in reversed(events) if event["event"] == "checked")
    return {
        "weights": job.experts * expert,
        "widths": list(widths),
        "measure": job.recipe.experts.measure,
        "prefix": job.recipe.encoder.prefix,
        "tokens": {"fit": _tokens(job, "fit"), "selection": _tokens(job, "selection"),
                   "measured on": rows_windows(job.recipe) * job.recipe.calibration.window},
        "seconds": kinds,
        "other_seconds": round(layer - sum(kinds.values()), 2),
        "measuring": _by_kind(event["seconds"] for event in events if _is_measuring(event)) | {
            "all": round(stages["measure"], 2)},
        "stages": {stage: round(value, 2) for stage, value in stages.items()},
        "layer_seconds": round(layer, 2),
        "with_assembly_and_check_seconds": round(whole, 2),
        "encoder_share_of_layer": round(kinds["encode"] / layer, 4),
        "encoder_share_with_assembly_and_check": round(kinds["encode"] / whole, 4),
        "encode_mws_a_width": round(expert * encodings / encode / 1e6, 2),
        **_behind_prefix(events, stages["quantize"]),
        "peak_device_bytes": max((unit.get("peak_device_bytes", 0) for unit in timed), default=0),
        "peak_host_bytes": max(event["host"] for event in events if event["event"] == "staged"),
        "rows_gini": round(_gini([rows for receipt in receipts for rows in receipt["fit_rows"]]), 3),
        "proxy_error": {str(w): _mean(error for r in receipts for error in r["proxy_error"][str(w)]) for w in widths},
        "interruptions": sum(event["event"] == "started" for event in events) - 1,
        "check": {key: checked[key] for key in ("findings", "mean")},
    }


def _by_kind(timed: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by kind of work, of many units."""
    timed = list(timed)
    return {kind: round(spent, 2) for kind in KINDS if (spent := sum(unit.get(kind, 0.0) for unit in timed))}


def _is_measuring(event: Mapping[str, Any]) -> bool:
    """Whether it tells the time of a layer's pass, or of experts that were measured."""
    measured = event["event"] == "captured" or event.get("unit", "").startswith(f"{MEASURED}/")
    return measured and isinstance(event.get("seconds"), dict)


def _behind_prefix(events: Iterable[Mapping[str, Any]], quantize: float) -> dict[str, Any]:
    """Seconds of what a quantized prefix encodes, by kind: dense linears, experts, and what comes behind them.

    saving: what files took that are written beside other work; writing: what was waited for. onward: of `quantize`
    seconds all that comes behind the experts, the last linear and both streams' passes among it.
    """
    begins = {"dense": "quantize/dense/", "experts": "final/", "last": "quantize/shared/"}
    found: dict[str, Counter[str]] = {part: Counter() for part in begins}
    for event in events:
        for part, prefix in begins.items():
            if event.get("unit", "").startswith(prefix) and isinstance(event.get("seconds"), dict):
                found[part].update({kind: spent for kind, spent in event["seconds"].items() if kind in (*KINDS, "all")})
                found[part]["saving"] += event.get("took", 0.0)
    if not found["experts"]:
        return {}
    onward = quantize - found["dense"]["all"] - found["experts"]["all"]
    return {"onward_seconds": round(onward, 2),
            "behind_prefix": {part: {kind: round(value, 2) for kind, value in spent.items()}
                              for part, spent in found.items()}}


def _mean(errors: Iterable[list[float] | None]) -> float:
    """Over the experts and projections that were encoded."""
    return float(np.mean([error for error in errors if error is not None]))


def _tokens(job: Job, split: str) -> int:
    choice = job.recipe.calibration
    return choice.window * (choice.fit_windows if split == "fit" else choice.selection_windows)


def _gini(counts: Sequence[int]) -> float:
    ordered, n = np.sort(np.asarray(counts, dtype=float)), len(counts)
    return float(((2 * np.arange(1, n + 1) - n - 1) * ordered).sum() / (n * ordered.sum()))


def table(result: Mapping[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{kind:<10}{seconds:8.1f} s" for kind, seconds in result["seconds"].items()]
    layer, whole = result["layer_seconds"], result["with_assembly_and_check_seconds"]
    shares = [100 * result[f"encoder_share_{of}"] for of in ("of_layer", "with_assembly_and_check")]
    device, host = (result[f"peak_{of}_bytes"] / 2**30 for of in ("device", "host"))
    lines += [
        f"{'other':<10}{result['other_seconds']:8.1f} s",
        f"{'layer':<10}{layer:8.1f} s, {shares[0]:.1f} % of it the encoder",
        f"{'all':<10}{whole:8.1f} s with assembly and check, {shares[1]:.1f} %",
        f"peak memory: device {device:.1f} GiB, host {host:.1f} GiB",
        f"{result['encode_mws_a_width']:.1f} Mweights/s a width; Gini of the experts' rows {result['rows_gini']}",
        f"check: {result['check']['findings'] or 'passed'}, routed mean {result['check']['mean']} bits",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="a folder with 45 GB to spare")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--fit", type=int, default=96, help="windows that shape the Hessians")
    parser.add_argument("--selection", type=int, default=24, help="windows that judge")
    parser.add_argument("--group", type=int, default=32, help="experts per unit of work")
    parser.add_argument("--low-memory", action="store_true")
    parser.add_argument("--predicted", action="store_true", help="simulate encodings, and encode what is chosen")
    parser.add_argument("--read-ahead", action="store_true", help="first have the layer in the system's cache, as "
                        "one is that was read while the layer before it was measured")
    parser.add_argument("--prefix", choices=["source", "quantized"], default="source", help="encoder.prefix")
    parser.add_argument("--out", type=Path, default=Path("reports/benchmarks/real-layer-h200.json"))
    options = parser.parse_args(arguments)
    options.shape = Shape(options.experts, options.hidden, options.intermediate, options.heads)
    job = run_piece(options, lambda text: print(text, flush=True))
    result = {
        "command": " ".join(["python", "-m", "keys35.bench.real_layer", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"keys35": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine(),
        "shape": vars(options.shape),
        "low_memory": options.low_memory,
        **figures(job),
    }
    said = [table(result)]
    if options.prefix == "source" and not options.predicted:  # what a projection is made of
        whole = project(result, GlmConfig.from_dict(GLM_5_3), measured_like(load_recipe("glm-5.3-2.75bpw")))
        result["projection"] = whole.facts()
        said.append(whole.text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, result)
    print(*said, sep="\n\n")


if __name__ == "__main__":
    main()
