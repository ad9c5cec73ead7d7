"""A unit's files, one per width, written by threads while later experts are still encoded."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from keys35.exl3.codebook import marker_tensor
from keys35.exl3.linear import EncodedLinear
from keys35.files.atomic import Saved, tensor_bytes, tensors_layout, write_pieces


class UnitFiles:
    """Writes each width's file as its tensors come; a file appears whole or not at all.

    Linears are best given in the order of their names, in which they are written: then little waits in memory.
    """

    def __init__(self, paths: Mapping[float, Path], shapes: Mapping[str, tuple[int, int]]) -> None:
        """paths: a file per width; shapes: padded (inputs, outputs) of every linear that will be given."""
        self.widths = tuple(paths)
        self._writers = {width: _Writer(path, width, shapes) for width, path in paths.items()}
        self._threads = ThreadPoolExecutor(max(1, len(paths)), "writer")
        self._written = {w: self._threads.submit(writer.write) for w, writer in self._writers.items()}

    def give(self, name: str, encoded: EncodedLinear) -> None:
        """Hand over one linear at one width; its tensors may be on a GPU, and are complete there.

        Raises what a writer has failed with.
        """
        if self._written[encoded.bits].done():
            self._written[encoded.bits].result()
        self._writers[encoded.bits].give(encoded.tensors(name))

    def finish(self) -> dict[Path, Saved]:
        """Wait for the files; their hashes. Raises ResumeError when the disk is full."""
        return {self._writers[width].path: written.result() for width, written in self._written.items()}

    def __enter__(self) -> "UnitFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for writer in self._writers.values():
            writer.stop()
        self._threads.shutdown()


class _Writer:
    def __init__(self, path: Path, width: float, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.path = path
        self._expected = {
            name: tensor for module, shape in shapes.items() for name, tensor in _blank(module, *shape, width).items()
        }
        self._ready: dict[str, Tensor] = {}
        self._change = threading.Condition()
        self._stopped = False

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        with self._change:
            self._ready |= tensors
            self._change.notify()

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            self._change.notify()

    def write(self) -> Saved:
        layout = tensors_layout(self._expected)
        return write_pieces(self.path, layout, self._contents([name for name, _, _ in layout]))

    def _contents(self, names: Sequence[str]) -> Iterator[memoryview]:
        beside = torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else nullcontext()
        for name in names:
            tensor = self._take(name)
            with beside:  # a stream of its own: copies do not wait behind the encoder's work
                content = tensor_bytes(tensor)
            yield content

    def _take(self, name: str) -> Tensor:
        if name.endswith(".mul1"):  # these come first in the file and are known before anything is encoded
            return marker_tensor("mul1")
        with self._change:
            self._change.wait_for(lambda: name in self._ready or self._stopped)
            if name not in self._ready:
                raise InterruptedError(f"{self.path}: the unit was given up")
            return self._ready.pop(name)


def _blank(module: str, inputs: int, outputs: int, width: float) -> dict[str, Tensor]:
    """What will be stored of a linear, without memory behind it."""
    with torch.device("meta"):
        trellis = torch.empty(inputs // 16, outputs // 16, int(16 * width), dtype=torch.int16)
        scales = [torch.empty(size, dtype=torch.float16) for size in (inputs, outputs)]
        marker = torch.empty((), dtype=torch.int32)
    return {f"{module}.trellis": trellis, f"{module}.suh": scales[0], f"{module}.svh": scales[1],
            f"{module}.mul1": marker}
