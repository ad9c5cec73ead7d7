"""How fast shards of GLM-5.3's true size are assembled, beside a plain copy of the same bytes on the same disk.

`python -m keys35.bench.assembly DIR --layers 2 --out FILE.json` writes pieces with random contents for some layers,
assembles their shards, and copies the shards. With --all the other layers' pieces are holes, so that all 81 shards
are written; each is removed when it is finished, because 276 GB rarely fit twice.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from keys35 import __version__
from keys35.bench.standin import write_stand_in
from keys35.calibration.text import load_text_set
from keys35.exl3.codebook import marker_tensor
from keys35.files.atomic import CHUNK_BYTES, Saved, save_pieces, write_json
from keys35.files.headers import pack_header, read_header, tensor_nbytes
from keys35.files.ledger import Workdir
from keys35.files.shards import shard_name
from keys35.glm.names import Role, TensorRule, census, exl3_parts, shard_of
from keys35.recipe import load_recipe
from keys35.report.machine import machine
from keys35.runtime.rank import peak_rss_bytes
from keys35.stages.assemble import SHARDS_AT_ONCE, write_shards
from keys35.stages.job import Job, read_source
from keys35.stages.pieces import Pieces
from keys35.stages.units import dense_file, dense_unit, expert_units

RECIPE = "glm-5.3-2.75bpw"
WIDTHS = (2, 3)
RANDOM = torch.randint(-(1 << 15), 1 << 15, (1 << 26,), dtype=torch.int16, generator=torch.Generator().manual_seed(35))


def open_stand_in(root: Path) -> tuple[Job, Pieces]:
    """A job on the header-true source with a quarter of every layer's experts at 2 bits and the rest at 3."""
    write_stand_in(root / "source")
    recipe = load_recipe(RECIPE)
    source, config, dropped = read_source(root / "source", recipe)
    work = Workdir.open(root / "work", {"bench": "assembly"})
    job = Job(source, config, census(config), dropped, recipe, load_text_set(recipe.calibration.set), work)
    return job, Pieces(job, {layer: [2, 3, 3, 3] * (job.experts // 4) for layer in config.moe_layers})


def write_pieces(job: Job, layer: int, real: bool) -> None:
    """A layer's encoded files and receipts, with random contents or as holes."""
    rules = [rule for rule in job.rules.values() if rule.layer == layer and rule.quantized]
    save = save_pieces if real else _save_holes
    dense = [rule for rule in rules if rule.role is Role.DENSE]
    path = dense_file(job, layer)
    job.work.commit(dense_unit(layer), {path: save(path, _parts(dense, job.recipe.dense.bits))}, {})
    widths = (job.recipe.mtp.bits,) if job.config.is_mtp(layer) else WIDTHS
    for unit in expert_units(job, layer) if job.config.is_moe(layer) else ():
        held = [rule for rule in rules if rule.expert in unit.experts]
        job.work.commit(unit.name, {unit.file(job, w): save(unit.file(job, w), _parts(held, w)) for w in widths}, {})


def _parts(rules: list[TensorRule], bits: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for number, rule in enumerate(rules):
        k, n = rule.padded
        shape, start = (k // 16, n // 16, 16 * bits), number * 1000
        names = exl3_parts(rule.module)
        tensors[names["trellis"]] = RANDOM[start : start + k * n // 16 * bits].view(shape)
        tensors |= {names["suh"]: RANDOM[:k].view(torch.float16), names["svh"]: RANDOM[:n].view(torch.float16)}
        tensors[names["mul1"]] = marker_tensor("mul1").reshape(())
    return tensors


def _save_holes(path: Path, tensors: dict[str, torch.Tensor]) -> Saved:
    names = {torch.int16: "I16", torch.float16: "F16", torch.int32: "I32"}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    layout = [(name, names[tensors[name].dtype], tuple(tensors[name].shape)) for name in order]
    header, sizes = pack_header(layout, {}), {name: tensor_nbytes(dtype, shape) for name, dtype, shape in layout}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(sizes.values()))
    return Saved("", read_header(path).digest, {name: _hash_of_zeros(size) for name, size in sizes.items()})


@cache
def _hash_of_zeros(size: int) -> str:
    return hashlib.sha256(bytes(size)).hexdigest()


def drop_cache(root: Path) -> None:
    """Push a folder's pages out of memory, so that the next reader meets the disk."""
    for path in root.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def copy(source: Path, target: Path) -> int:
    """The plain copy: read, write, sync, nothing else; returns the bytes."""
    buffer, total = memoryview(bytearray(CHUNK_BYTES)), 0
    with open(source, "rb", buffering=0) as read, open(target, "wb", buffering=0) as write:
        while count := read.readinto(buffer):
            write.write(buffer[:count])
            total += count
        os.fsync(write.fileno())
    target.unlink()
    return total


def assemble_and_copy(
    job: Job, pieces: Pieces, out: Path, layers: list[int], rounds: int
) -> Iterator[dict[str, float]]:
    """Bytes and seconds of assembling these layers' shards, and of copying them, once per round."""
    shards = shards_of(job)
    named = {name: shards[name] for name in shards if shards[name][0].layer in layers}
    for _ in range(rounds):
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(job.work.path("receipts", "assemble"), ignore_errors=True)
        drop_cache(job.work.root)
        started = time.perf_counter()
        written = sum(receipt.size for receipt, _ in write_shards(job, pieces, out, named))
        seconds = time.perf_counter() - started
        drop_cache(out)
        started = time.perf_counter()
        copied = sum(copy(path, path.with_suffix(".copy")) for path in sorted(out.glob("*.safetensors")))
        copying = time.perf_counter() - started
        assert copied == written
        yield {"bytes": written, "assemble_seconds": seconds, "copy_seconds": copying,
               "assemble_mb_s": written / seconds / 1e6, "copy_mb_s": copied / copying / 1e6,
               "share_of_copy": copying / seconds}


def assemble_all(job: Job, pieces: Pieces, out: Path) -> dict[str, float]:
    """All shards, each removed when it is finished."""
    started, written = time.perf_counter(), 0
    shards = shards_of(job)
    for receipt, _ in write_shards(job, pieces, out, shards):
        assert (out / receipt.file).stat().st_size == receipt.size
        written += receipt.size
        (out / receipt.file).unlink()
    seconds = time.perf_counter() - started
    return {"shards": len(shards), "bytes": written, "seconds": seconds, "mb_s": written / seconds / 1e6}


def shards_of(job: Job) -> dict[str, list[TensorRule]]:
    """Every shard's tensors by file name."""
    total = job.recipe.output.shards
    shards: dict[str, list[TensorRule]] = {shard_name(number + 1, total): [] for number in range(total)}
    names = list(shards)
    for rule in job.rules.values():
        shards[names[shard_of(rule, job.config, total)]].append(rule)
    return shards


def main() -> None:
    """Measure, print one line per round, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="an empty folder on the disk to be measured")
    parser.add_argument("--layers", type=int, default=2, help="MoE layers with real contents, 11 GB each")
    parser.add_argument("--rounds", type=int, default=3, help="times that both are measured")
    parser.add_argument("--all", action="store_true", help="then write all 81 shards, the other pieces being holes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    root: Path = options.directory / "assembly-bench"
    job, pieces = open_stand_in(root)
    real = job.config.moe_layers[: options.layers]
    for layer in real:
        write_pieces(job, layer, real=True)
    figures = {
        "command": f"python -m keys35.bench.assembly DIR --layers {options.layers} --rounds {options.rounds}"
                   f"{' --all' * options.all}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"keys35": __version__, "python": platform.python_version()},
        "machine": machine(),
        "shards_at_once": min(SHARDS_AT_ONCE, os.cpu_count() or 1),
        "rounds": list(assemble_and_copy(job, pieces, root / "out", real, options.rounds)),
    }
    if options.all:
        for layer in set(job.config.layers) - set(real):
            write_pieces(job, layer, real=False)
        figures["all"] = assemble_all(job, pieces, root / "out")
    figures["peak_rss_bytes"] = peak_rss_bytes()
    shutil.rmtree(root)
    print(json.dumps(figures, indent=1))
    if options.out:
        write_json(options.out, figures)


if __name__ == "__main__":
    main()
