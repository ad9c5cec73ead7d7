"""Where each tensor of the output comes from: a carried source tensor, or a part of an encoded linear."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from keys35.errors import ResumeError
from keys35.files.atomic import sha256_file
from keys35.files.headers import ShardHeader, read_exact, read_header
from keys35.files.shards import TensorSpec
from keys35.glm.names import Role, TensorRule, exl3_parts
from keys35.stages.job import Job
from keys35.stages.units import ExpertUnit, dense_file, dense_unit, expert_units


@dataclass
class Pieces:
    """Reads single tensors out of the work directory's finished files, each file's hash checked once."""

    job: Job
    allocation: dict[int, list[int]]
    _headers: dict[Path, ShardHeader] = field(default_factory=dict)
    _experts: dict[tuple[int, int], ExpertUnit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in self.job.config.layers:
            if self.job.config.is_moe(layer):
                self._experts |= {(layer, e): u for u in expert_units(self.job, layer) for e in u.experts}

    def specs(self, rule: TensorRule) -> Iterator[TensorSpec]:
        """What the output stores for one source tensor, in writing order; bytes are read when asked for."""
        if rule.role is Role.CARRIED:
            entry = self.job.source.tensors[rule.source].entry
            yield TensorSpec(rule.name, entry.dtype, entry.shape, partial(self.job.source.raw, rule.source))
            return
        path = self._file(rule)
        header = self._headers.get(path) or self._open(path, rule)
        for name in exl3_parts(rule.module).values():
            entry = header.entries[name]
            yield TensorSpec(name, entry.dtype, entry.shape, partial(_read, path, entry.start, entry.nbytes))

    def recorded(self, rules: Sequence[TensorRule]) -> dict[str, str]:
        """SHA-256 by receipt of every work file that the quantized tensors among `rules` come from."""
        found: dict[str, str] = {}
        for rule in rules:
            if rule.quantized:
                name = self._file(rule).relative_to(self.job.work.root).as_posix()
                if name not in found:
                    found[name] = {e["path"]: e["sha256"] for e in self._receipt(rule)["files"]}[name]
        return found

    def width(self, rule: TensorRule) -> int:
        """Bits per weight of a quantized tensor."""
        if rule.role is Role.DENSE:
            return self.job.recipe.dense.bits
        if rule.role is Role.MTP_EXPERT:
            return self.job.recipe.mtp.bits
        return self.allocation[rule.layer][rule.expert]

    def proxy_error(self, rule: TensorRule) -> float:
        """The encoder's relative error of a quantized tensor under its Hessian."""
        data = self._receipt(rule)["data"]
        if rule.role is Role.DENSE:
            return data["proxy_error"][rule.module]
        leaf = ("gate_proj", "up_proj", "down_proj").index(rule.projection)
        return data["proxy_error"][str(self.width(rule))][data["experts"].index(rule.expert)][leaf]

    def _file(self, rule: TensorRule) -> Path:
        if rule.role is Role.DENSE:
            return dense_file(self.job, rule.layer)
        return self._experts[rule.layer, rule.expert].file(self.job, self.width(rule))

    def _receipt(self, rule: TensorRule) -> dict:
        dense = rule.role is Role.DENSE
        unit = dense_unit(rule.layer) if dense else self._experts[rule.layer, rule.expert].name
        receipt = self.job.work.receipt(unit)
        if receipt is None:
            raise ResumeError(f"{unit} is missing or damaged: run `keys35 quantize --work {self.job.work.root}` first")
        return receipt

    def _open(self, path: Path, rule: TensorRule) -> ShardHeader:
        """Check a file against its receipt before any byte of it is published."""
        name = path.relative_to(self.job.work.root).as_posix()
        recorded = {entry["path"]: entry["sha256"] for entry in self._receipt(rule)["files"]}
        if recorded.get(name) != sha256_file(path):
            raise ResumeError(f"{path} does not match its receipt: delete it and run the same command again")
        self._headers[path] = read_header(path)
        return self._headers[path]


def _read(path: Path, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        read_exact(descriptor, path, start, memoryview(data))
    finally:
        os.close(descriptor)
    return bytes(data)
