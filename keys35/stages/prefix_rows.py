"""Rows behind the quantized prefix, made and on their way to whoever encodes a layer's experts: files side by side."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from keys35.calibration.correction import PairedInputs
from keys35.calibration.statistics import MoeRows
from keys35.calibration.windows import Windows
from keys35.files.atomic import save_tensors
from keys35.glm.block import LayerWeights
from keys35.glm.layer import gated_mlp, mlp_linears, route
from keys35.host import fill, on_host
from keys35.precision import short_products
from keys35.stages.background import saving
from keys35.stages.candidates import MixStore
from keys35.stages.capture import layer_weights
from keys35.stages.expert_encoding import PrefixRows, at_hand
from keys35.stages.experts import Shelf
from keys35.stages.job import Job
from keys35.stages.room import rows_home
from keys35.stages.spans import Spans
from keys35.stages.streams import (
    SHARED,
    SOURCE,
    Handed,
    PairedRows,
    Streams,
    halves,
    load_parts,
    paired_rows,
    states_attended,
)
from keys35.stages.units import dense_unit, layer_name

LEAST_WEIGHT = 1e-6  # a token that its router gives nothing has no share to be divided by
BESIDE = ("source", "missing", "half", "hessian")  # of `PrefixRows`, beside the rows of the quantized stream
PARTS = {
    "found": ("fit.x", "fit.expert_ids", "fit.weights", "half", "hessian"),
    "source": ("source",),
    "missing": ("missing",),
}
"""What each file holds: about as much, 5.7 GB for GLM-5.3. Hashing takes longest, and each file has a thread for it."""


def entering(job: Job, layer: int, streams: Streams, weights: LayerWeights) -> PairedInputs:
    """What enters a layer's MLP in both streams."""
    sums = PairedInputs()
    for rows in paired_rows(job, layer, streams, weights):
        sums.add(rows.source, rows.found, rows.half)
    return sums


def rows_again(
    job: Job, layer: int, windows: Windows, allocation: dict[int, list[float]], handed: Handed,
    shelf: Shelf | None = None,
) -> Callable[[], None]:
    """A layer's rows where a file is gone before its experts are encoded; its dense linears are, and stay.

    The files are written in the background: what is returned waits for that. shelf and handed: as of
    `encode_behind_prefix`.
    """
    spent = Spans(job.device)
    with spent("reading"):
        streams = states_attended(job, layer, windows, allocation)
        exact = layer_weights(job, job.store, layer, experts=False)
        lossy = MixStore(job, allocation, final=True, first=True).without_experts(layer)
    with spent("forward"):
        hessian = entering(job, layer, streams, lossy).finish()
        rows = make_rows(job, layer, streams, exact, lossy, hessian, shelf)
    job.work.log("dense-time", unit=dense_unit(layer), seconds=spent.facts())
    if not job.config.is_mtp(layer):
        handed.attended = {layer: streams}
    return saving(job, dense_unit(layer), "dense-saved", partial(_save_again, job, layer, rows))


def _save_again(job: Job, layer: int, rows: PrefixRows) -> None:
    unit = dense_unit(layer)
    with ThreadPoolExecutor(len(PARTS)) as pool:
        saved = saving_rows(job, layer, rows, pool)
    found = {part: sha256.result() for part, sha256 in saved.items()}
    job.work.commit(unit, job.work.recorded(unit), job.work.require(unit)["data"] | {"rows_sha256": found})


def make_rows(
    job: Job, layer: int, streams: Streams, exact: LayerWeights, lossy: LayerWeights, hessian: Tensor,
    shelf: Shelf | None,
) -> PrefixRows:
    """What a layer's experts are encoded on, once its other linears are there; a shelf gets them, too."""
    count, length, d = streams[SOURCE].x.shape
    tokens, k, at = count * length, job.config.num_experts_per_tok, 0
    home = rows_home(job, 3 * tokens * d * job.states_dtype.itemsize) if shelf is not None else None
    x, source, missing = (torch.empty(tokens, d, dtype=job.states_dtype, device=home) for _ in range(3))
    fit = MoeRows(x, torch.empty(tokens, k, dtype=torch.int64), torch.empty(tokens, k))
    for rows in paired_rows(job, layer, streams, exact):
        part = slice(at, at := at + len(rows.found))
        found = _expert_rows(job, layer, rows, exact, lossy)
        for kept, new in zip((fit.x, fit.expert_ids, fit.weights, source, missing), found, strict=True):
            fill(kept[part], new)
    rows = PrefixRows(fit, source, missing, halves(range(count), length), hessian.cpu())
    if shelf is not None:
        shelf.rows[layer] = at_hand(job, rows)
    return rows


def _expert_rows(
    job: Job, layer: int, rows: PairedRows, exact: LayerWeights, lossy: LayerWeights
) -> tuple[Tensor, ...]:
    """Of `PrefixRows`: the quantized stream's inputs, ids and weights, the source's inputs and what is missing.

    A token's experts share in what its state lacks behind attention and the shared expert as they share in its output.
    """
    ids, router = route(job.config, exact, rows.found)
    with short_products(job.device):
        shared = (gated_mlp(rows.source, *mlp_linears(exact, SHARED))
                  - gated_mlp(rows.found, *mlp_linears(lossy, SHARED)))
    missing = (rows.missing / rows.root + shared) / router.sum(-1, keepdim=True).clamp(min=LEAST_WEIGHT)
    return rows.found, ids, router * rows.root, rows.source, missing


def rows_files(job: Job, layer: int) -> dict[str, Path]:
    """Inputs of a layer's experts in both streams, kept until they are encoded."""
    return {part: job.work.path("prefix", f"{layer_name(layer)}-rows-{part}.safetensors") for part in PARTS}


def saving_rows(job: Job, layer: int, rows: PrefixRows, pool: ThreadPoolExecutor) -> dict[str, Future[str]]:
    """Begin to write a layer's rows; the SHA-256 of each part's file, which the dense linears' receipt is to hold."""
    tensors = rows.fit.tensors("fit") | {name: getattr(rows, name) for name in BESIDE}
    return {part: pool.submit(_save, path, {name: tensors[name] for name in PARTS[part]})
            for part, path in rows_files(job, layer).items()}


def _save(path: Path, tensors: dict[str, Tensor]) -> str:
    return save_tensors(path, {name: on_host(tensor) for name, tensor in tensors.items()})


def prefix_rows(job: Job, layer: int) -> PrefixRows:
    """A layer's rows behind the quantized prefix; raises ResumeError if they are gone or damaged."""
    expected = job.work.require(dense_unit(layer))["data"]["rows_sha256"]
    tensors: dict[str, Tensor] = {}
    for part in load_parts(rows_files(job, layer), expected).values():
        tensors |= part
    more = {name: tensors[name] for name in BESIDE}
    return at_hand(job, PrefixRows(MoeRows.from_tensors(tensors, "fit"), **more))
