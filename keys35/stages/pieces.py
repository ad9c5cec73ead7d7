"""Where each tensor of the output comes from: a carried source tensor, or a part of an encoded linear."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from keys35.errors import ResumeError
from keys35.files.atomic import read_pieces
from keys35.files.headers import ShardHeader, open_regular, read_header
from keys35.files.shards import TensorSpec
from keys35.glm.names import PROJECTIONS, Role, TensorRule, exl3_parts
from keys35.stages.job import Job
from keys35.stages.units import ExpertUnit, dense_home, final_units, recorded_entry

UNITS_IN_MEMORY = 256


@dataclass(frozen=True)
class Piece:
    """A finished file of the work directory: its table of contents and what its receipt records of it."""

    path: Path
    header: ShardHeader
    recorded: dict[str, Any]


class Pieces:
    """Reads single tensors out of the work directory's finished files, each tensor's hash checked as it is read.

    Safe to use from several threads.
    """

    def __init__(self, job: Job, allocation: dict[int, list[int]]) -> None:
        self.job, self.allocation = job, allocation
        moe = [layer for layer in job.config.layers if job.config.is_moe(layer)]
        self._experts: dict[tuple[int, int], ExpertUnit] = {
            (layer, expert): unit for layer in moe for unit in final_units(job, layer) for expert in unit.experts
        }
        self._receipt = lru_cache(UNITS_IN_MEMORY)(self._read_receipt)
        self._piece = lru_cache(UNITS_IN_MEMORY)(self._open)

    def specs(self, rule: TensorRule) -> Iterator[TensorSpec]:
        """What the output stores for one source tensor, in writing order; bytes are read when asked for."""
        if rule.role is Role.CARRIED:
            entry = self.job.source.tensors[rule.source].entry
            yield TensorSpec(rule.name, entry.dtype, entry.shape, partial(self.job.source.pieces, rule.source))
            return
        unit = self._unit(rule)
        piece = self._piece(self._file(rule), unit)
        for name in exl3_parts(rule.module).values():
            entry = piece.header.entries.get(name)
            if entry is None:  # a sample alone was encoded
                raise ResumeError(f"{unit} has no {name}: run `keys35 quantize --work {self.job.work.root}` first")
            yield TensorSpec(name, entry.dtype, entry.shape, partial(_verified, piece, name))

    def recorded(self, rules: Sequence[TensorRule]) -> dict[str, str]:
        """SHA-256 by receipt of every work file that the quantized tensors among `rules` come from."""
        found: dict[str, str] = {}
        for rule in rules:
            if rule.quantized:
                name = self._file(rule).relative_to(self.job.work.root).as_posix()
                if name not in found:
                    found[name] = self._entry(self._file(rule), self._unit(rule))["sha256"]
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
        data = self._receipt(self._unit(rule))["data"]
        if rule.role is Role.DENSE:
            return data["proxy_error"][rule.module]
        leaf = PROJECTIONS.index(rule.projection)
        return data["proxy_error"][str(self.width(rule))][data["experts"].index(rule.expert)][leaf]

    def _file(self, rule: TensorRule) -> Path:
        if rule.role is Role.DENSE:
            return dense_home(self.job, rule)[1]
        return self._experts[rule.layer, rule.expert].file(self.job, self.width(rule))

    def _unit(self, rule: TensorRule) -> str:
        return dense_home(self.job, rule)[0] if rule.role is Role.DENSE else self._experts[rule.layer, rule.expert].name

    def _read_receipt(self, unit: str) -> dict[str, Any]:
        receipt = self.job.work.receipt(unit)
        if receipt is None:
            raise ResumeError(f"{unit} is missing or damaged: run `keys35 quantize --work {self.job.work.root}` first")
        return receipt

    def _entry(self, path: Path, unit: str) -> dict[str, Any]:
        entry = recorded_entry(self.job, self._receipt(unit), path)
        if entry is None:
            raise ResumeError(f"{unit} has no {path.name}: run `keys35 quantize --work {self.job.work.root}` first")
        return entry

    def _open(self, path: Path, unit: str) -> Piece:
        """Hold a file's table of contents against its receipt before any byte of it is published."""
        piece = Piece(path, read_header(path), self._entry(path, unit))
        if piece.header.digest != piece.recorded["header"]:
            raise _damaged(path)
        return piece


def _verified(piece: Piece, name: str) -> Iterator[memoryview]:
    """One tensor's bytes; raises ResumeError behind the last of them if they are not the recorded ones."""
    entry, digest = piece.header.entries[name], hashlib.sha256()
    fd = open_regular(piece.path)
    try:
        for part in read_pieces(fd, piece.path, entry.start, entry.nbytes):
            digest.update(part)
            yield part
    finally:
        os.close(fd)
    if digest.hexdigest() != piece.recorded["tensors"][name]:
        raise _damaged(piece.path)


def _damaged(path: Path) -> ResumeError:
    return ResumeError(f"{path} does not match its receipt: delete it and run the same command again")
