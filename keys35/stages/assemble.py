"""Assemble: the shards, their index, both configs and the report, each file complete or absent."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from keys35 import __version__
from keys35.allocation import plain_width
from keys35.errors import PlanError
from keys35.exl3.codebook import MARKERS
from keys35.files.atomic import (
    PARTIAL,
    make_folder,
    read_json,
    read_pieces,
    require_space,
    sha256_file,
    write_bytes,
    write_json,
)
from keys35.files.forms import OBJECT, read_formed
from keys35.files.headers import TORCH_DTYPE, read_header
from keys35.files.shards import INDEX_NAME, ShardReceipt, shard_name, write_index, write_shard
from keys35.files.source import ShardedSource
from keys35.glm.names import Role, TensorRule, shard_of
from keys35.memory import release
from keys35.progress import Progress
from keys35.report.card import CARD, SOURCE_CARD
from keys35.report.facts import CONFIGS, QUALITY, QUANT, REPORT, of_another_job
from keys35.report.html import PAGE
from keys35.report.measured import MAKING, MEASUREMENTS
from keys35.stages.allocate import ALLOCATION, load_allocation
from keys35.stages.dropped import dropped_anywhere
from keys35.stages.job import Job, refuse_nesting
from keys35.stages.pieces import Pieces
from keys35.stages.profile import one_width_keys
from keys35.stages.sizes import class_sizes
from keys35.stages.zero_columns import zero_in_source

# Written into the output by later steps; a second assembly leaves them to be rewritten.
LATER = {QUALITY, CARD, SOURCE_CARD, PAGE, MEASUREMENTS, MAKING}
FORMAT = "keys35-v1"
NAMED = {"type": "object", "properties": {"recipe": OBJECT}}
HEAD_BITS = 16
SHARDS_AT_ONCE = 4


def assemble(job: Job, out: Path, progress: Progress) -> dict[str, object]:
    """Write the finished checkpoint to `out` and return its report; finished shards are kept on resume.

    Raises PlanError if `out` holds files this job would not write, or too little space is free.
    """
    pieces = Pieces(job, load_allocation(job))
    total = job.recipe.output.shards
    shards: list[list[TensorRule]] = [[] for _ in range(total)]
    for rule in job.rules.values():
        shards[shard_of(rule, job.config, total)].append(rule)
    prepare(job, out)
    named = {shard_name(number + 1, total): rules for number, rules in enumerate(shards)}
    meter, receipts = progress.meter("assemble", total), {}
    for receipt, kept in write_shards(job, pieces, out, named):
        receipts[receipt.file] = receipt
        meter.count(receipt.file, kept)
        release()
    receipts = [receipts[name] for name in named]
    write_index(out / INDEX_NAME, receipts, sum(r.tensor_bytes for r in receipts))
    _side_files(job, out)
    stored = ShardedSource(out, {}, tuple(read_header(out / receipt.file) for receipt in receipts))
    _write_configs(job, pieces, stored)
    report = _report(job, pieces, stored, receipts)
    write_json(out / REPORT, report)
    job.work.log("assembled", out=str(out), bytes=sum(r.size for r in receipts))
    return report


def write_shards(
    job: Job, pieces: Pieces, out: Path, shards: Mapping[str, list[TensorRule]]
) -> Iterator[tuple[ShardReceipt, bool]]:
    """Write shards, some at a time, and yield each with whether it was found finished, in the order they end."""
    with ThreadPoolExecutor(min(SHARDS_AT_ONCE, os.cpu_count() or 1)) as threads:
        running = [threads.submit(_shard, job, pieces, out, name, rules) for name, rules in shards.items()]
        try:
            for future in as_completed(running):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def prepare(job: Job, out: Path) -> None:
    """Make the output's folder and remove our own leftovers in it.

    Raises PlanError for foreign files, another job's checkpoint, folders inside one another, or too little space.
    """
    total = job.recipe.output.shards
    refuse_nesting(job.source.root, out, job.work.root)
    _refuse_another_jobs(job, out)
    make_folder(out, PlanError)
    ours = {shard_name(n + 1, total) for n in range(total)} | {INDEX_NAME, "config.json", QUANT}
    ours |= {REPORT, *LATER, *(_relative(job, p) for p in job.source.side_files())}
    found = {p.relative_to(out).as_posix() for p in out.rglob("*") if not p.is_dir()}
    leftovers = {name for name in found if name.endswith(PARTIAL) and name.removesuffix(PARTIAL) in ours}
    foreign = sorted(found - ours - leftovers)
    if foreign:
        raise PlanError(f"{out} holds files that are not this job's: {foreign[:5]}. Choose an empty directory")
    for name in leftovers:
        (out / name).unlink()
    written = sum((out / name).stat().st_size for name in found & ours)
    nbytes = {name: tensor.entry.nbytes for name, tensor in job.source.tensors.items()}
    needed = sum(c.output_bytes for c in class_sizes(job.rules.values(), job.recipe, nbytes, tp=1))
    require_space(out, max(0, needed - written))


def _refuse_another_jobs(job: Job, out: Path) -> None:
    """Another job's checkpoint has the same file names: its quality report and page would stay beside our shards."""
    if not (out / REPORT).is_file():
        return
    found = read_formed(out / REPORT, NAMED, PlanError, "choose an empty directory")
    other = of_another_job(found, job.work)
    if other:
        raise PlanError(f"{out} holds another job's checkpoint ({found.get('recipe', {}).get('name')}: another "
                        f"{' and '.join(other)}). Choose an empty directory")


def _shard(
    job: Job, pieces: Pieces, out: Path, name: str, rules: list[TensorRule]
) -> tuple[ShardReceipt, bool]:
    unit = f"assemble/{name.removesuffix('.safetensors')}"
    known = job.work.receipt(unit)
    path = out / name
    made_of = {"out": str(out.resolve()), "pieces": pieces.recorded(rules)}
    if known and made_of.items() <= known["data"].items() and path.is_file():
        stored = known["data"]["shard"]
        if path.stat().st_size == stored["size"] and sha256_file(path) == stored["sha256"]:
            return ShardReceipt(**{**stored, "tensors": tuple(stored["tensors"])}), True
    receipt = write_shard(path, [spec for rule in rules for spec in pieces.specs(rule)])
    _compare_carried(job.source, path, rules)
    job.work.commit(unit, [], made_of | {"shard": asdict(receipt)})
    return receipt, False


def _compare_carried(source: ShardedSource, path: Path, rules: list[TensorRule]) -> None:
    """Read back what was carried and hold it against the source, byte for byte."""
    header = read_header(path)
    with open(path, "rb") as file:
        for rule in rules:
            if rule.role is Role.CARRIED:
                entry = header.entries[rule.name]
                written = read_pieces(file.fileno(), path, entry.start, entry.nbytes)
                if any(a != b for a, b in zip(written, source.pieces(rule.source), strict=True)):
                    raise PlanError(f"{path}: {rule.name} was read back differently from the source: check the disk")


def _relative(job: Job, path: Path) -> str:
    return path.relative_to(job.source.root).as_posix()


def _side_files(job: Job, out: Path) -> None:
    for path in job.source.side_files():
        target = out / _relative(job, path)
        if not target.is_file() or sha256_file(target) != sha256_file(path):
            write_bytes(target, path.read_bytes())


def _write_configs(job: Job, pieces: Pieces, stored: ShardedSource) -> None:
    """config.json keeps every source key; both files carry the same facts about the quantization."""
    recipe, out = job.recipe, stored.root
    mean = float(_routed_mean(job, pieces))
    quantization: dict[str, object] = {
        "quant_method": "exl3",
        "version": f"keys35 {__version__}",
        "format": FORMAT,
        "bits": mean,
        "head_bits": HEAD_BITS,
        "codebook": "mul1",
        "profile": recipe.output.profile,
        "dense_bits": recipe.dense_bits,
        "mtp_bits": recipe.mtp.bits,
        "calibration": {"rows": recipe.calibration.fit_windows, "cols": recipe.calibration.window},
    }
    config = dict(job.source.config)
    if "quantization_config" in config:
        quantization["original_quantization_config"] = config["quantization_config"]
    quantization["expert_bits"] = _expert_bits(job, pieces)
    if recipe.output.profile == "uniform-layer":
        quantization |= one_width_keys(job.rules.values(), quantization["expert_bits"], recipe.dense_bits)
    write_json(out / "config.json", {**config, "tie_word_embeddings": False, "quantization_config": quantization})
    write_json(out / QUANT, {**quantization, "tensor_storage": _tensor_storage(stored)})


def _expert_bits(job: Job, pieces: Pieces) -> dict[str, list[int]]:
    bits = {str(layer): list(widths) for layer, widths in pieces.allocation.items()}
    return bits | {str(layer): [job.recipe.mtp.bits] * job.experts for layer in job.config.mtp_layers}


def _tensor_storage(stored: ShardedSource) -> dict[str, object]:
    """Per module: stored tensors, and for EXL3 ones the width by trellis shape (format notes 3.9)."""
    storage: dict[str, dict] = {}
    for name, tensor in stored.tensors.items():
        entry, module = tensor.entry, storage.setdefault(name.rpartition(".")[0], {"stored_tensors": {}})
        dtype = str(TORCH_DTYPE[entry.dtype])
        module["stored_tensors"][name] = {"shape": list(entry.shape), "n_bytes": entry.nbytes, "dtype": dtype}
        if name.endswith(".trellis"):
            module["quant_format"] = "exl3"
            module["bits_per_weight"] = plain_width(entry.shape[-1] / 16)
            module["mul1_multiplier"] = MARKERS["mul1"]
    return storage


def _routed_mean(job: Job, pieces: Pieces) -> Fraction:
    widths = [width for layer in pieces.allocation.values() for width in layer]
    return Fraction(sum(widths)) / len(widths)


def _report(
    job: Job, pieces: Pieces, stored: ShardedSource, receipts: list[ShardReceipt]
) -> dict[str, object]:
    """Everything a reader needs to trust the files; widths come from the shapes on disk, not from memory.

    Holds no times, paths or host names: a resumed run writes the same bytes.
    """
    quantized = [rule for rule in job.rules.values() if rule.quantized]
    shapes = {rule.name: stored.tensors[f"{rule.module}.trellis"].entry.shape for rule in quantized}
    width = {name: Fraction(shape[-1], 16) for name, shape in shapes.items()}
    routed = [rule for rule in quantized if rule.role is Role.EXPERT]
    mean = sum((width[rule.name] * rule.numel for rule in routed), Fraction(0)) / sum(rule.numel for rule in routed)
    histogram = {str(layer): _histogram(width, routed, layer) for layer in pieces.allocation}
    allocation = read_json(job.work.path(ALLOCATION))
    return {
        "format": FORMAT,
        "tool": f"keys35 {__version__}",
        "source_fingerprint": job.source.fingerprint(),
        "recipe": job.recipe.published().model_dump(mode="json"),
        "recipe_sha256": job.recipe.published().digest(),
        "calibration_text_sha256": job.text.digest,
        "routed_mean_bits": float(mean),
        "routed_mean_bits_exact": str(mean),
        "widths_by_layer": histogram,
        "width_basis": allocation["choice"]["basis"],
        "widths_total": dict(sorted(sum((Counter(h) for h in histogram.values()), Counter()).items())),
        "mtp_bits": job.recipe.mtp.bits,
        "dense_bits": job.recipe.dense_bits,
        "proxy_errors": _proxy_errors(pieces, quantized, width),
        "zero_columns": zero_in_source(quantized, stored, job.source),
        "shards": [{"file": r.file, "bytes": r.size, "sha256": r.sha256, "tensors": len(r.tensors)} for r in receipts],
        "total_bytes": sum(r.size for r in receipts),
        "configs": {name: sha256_file(stored.root / name) for name in CONFIGS},
        "carried_identical": sorted(r.name for r in job.rules.values() if not r.quantized),
        "dropped": list(job.dropped),
        "warnings": [*([allocation["warning"]] if allocation["warning"] else []), *_warnings(job)],
    }


def _proxy_errors(
    pieces: Pieces, quantized: list[TensorRule], width: Mapping[str, Fraction]
) -> list[dict[str, object]]:
    """Number, mean and largest error of the linears of each role and width."""
    errors: dict[tuple[Role, int | float], list[float]] = {}
    for rule in quantized:
        errors.setdefault((rule.role, plain_width(float(width[rule.name]))), []).append(pieces.proxy_error(rule))
    return [{"role": role.value, "bits": bits, "linears": len(v), "mean": sum(v) / len(v), "max": max(v)}
            for (role, bits), v in sorted(errors.items())]


def _histogram(width: dict[str, Fraction], routed: list[TensorRule], layer: int) -> dict[str, int]:
    """Experts of a layer per width; one projection stands for an expert, `check` sees that all three agree."""
    experts = (r.name for r in routed if r.layer == layer and r.projection == "down_proj")
    found = Counter(str(plain_width(float(width[name]))) for name in experts)
    return dict(sorted(found.items()))


def _warnings(job: Job) -> list[str]:
    """What a careful reader should know: text that was dropped, experts without data, encodes without a Hessian."""
    found = [f"calibration: {item.split} window {item.window} ({item.domain}) was dropped, its values are not finite "
             f"from layer {item.layer} on" for item in dropped_anywhere(job)]
    for name in job.work.units():
        receipt = job.work.receipt(name)
        if not name.startswith(("experts/", "final/", "quantize/dense/", "quantize/shared/")) or receipt is None:
            continue
        data = receipt["data"]
        if data["fallback"]:
            found.append(f"{name}: encoded without a usable Hessian: {data['fallback'][:4]}")
        if "fit_rows" not in data:
            continue
        starved = [e for e, rows in zip(data["experts"], data["fit_rows"], strict=True) if rows == 0]
        if starved:
            found.append(f"{name}: experts {starved} saw no calibration row; encoded from the layer's statistics")
    return found

