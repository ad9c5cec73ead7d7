"""Rows behind the quantized prefix on their way to whoever encodes a layer's experts: three files, side by side."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from keys35.calibration.statistics import MoeRows
from keys35.files.atomic import load_tensors, save_tensors
from keys35.host import on_host
from keys35.stages.expert_encoding import PrefixRows, at_hand
from keys35.stages.job import Job
from keys35.stages.units import dense_unit, layer_name

BESIDE = ("source", "missing", "half", "hessian")  # of `PrefixRows`, beside the rows of the quantized stream
PARTS = {
    "found": ("fit.x", "fit.expert_ids", "fit.weights", "half", "hessian"),
    "source": ("source",),
    "missing": ("missing",),
}
"""What each file holds: about as much, 5.7 GB for GLM-5.3. Hashing takes longest, and each file has a thread for it."""


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
    files, tensors = rows_files(job, layer), {}
    with ThreadPoolExecutor(len(PARTS)) as pool:
        for part in pool.map(lambda part: load_tensors(files[part], expect_sha256=expected[part]), PARTS):
            tensors |= part
    more = {name: tensors[name] for name in BESIDE}
    return at_hand(job, PrefixRows(MoeRows.from_tensors(tensors, "fit"), **more))
