"""Tail-biting Viterbi search on the GPU: the launcher of gpu/viterbi.cu and, for the rarer widths, gpu/viterbi_any.cu.

A tile's states depend on its targets alone: not on the batch, its place in it, the launch or the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import EncodeError
from ..gpu.compile import compile_ahead, compiler
from ..gpu.launch import Limits, load_kernel
from ..tiles import RING, symbol_bits

FAST_WIDTHS = (2, 3, 4, 5, 6, 7, 8)
FAST_THREADS = 256
ANY_THREADS = 512
ANY_BLOCKS = 2
"""Blocks a multiprocessor of the kernel for any width: one works while another walks back."""

_STEPS_KEPT = {2: RING // 4, 3: RING // 2}
"""Steps of a tile whose costs go to the history (all 256 where absent); as KEPT in viterbi.cu has it."""
_MOST_TILES = 8
"""Tiles that a block advances in step at most: a warp walks back over each."""


@dataclass(frozen=True)
class Strips:
    """Tiles in strips of 16 rows: how many side by side, and elements to the next row and strip."""

    columns: int
    row_stride: int
    strip_stride: int
    states_stride: int


RING_ORDER = Strips(0, 0, 0, 0)


@dataclass(frozen=True)
class Launch:
    """How tiles are spread over a device. scratch_bytes is bounded by the device, whatever the number of tiles."""

    source: str
    settings: tuple[tuple[str, int], ...]
    blocks: int
    threads: int
    group: int
    shared_bytes: int
    scratch_bytes: int


def _tile_bytes(bits: int) -> int:
    """Shared memory of one tile: two copies of its costs, and two sides of targets and lowerings (viterbi.cu)."""
    nodes = 65536 >> bits
    copy = 2 * (nodes + nodes // 8 if bits <= 3 else nodes)
    return 2 * copy + 2 * (2 * RING + 4 * 9 + 12)


def plan_launch(tiles: int, bits: float, limits: Limits) -> Launch:
    """Spread tiles over a device.

    Raises EncodeError for a width that EXL3 does not have.
    """
    whole, half = int(bits), int(2 * bits) % 2
    symbol_bits(bits)
    room = limits.shared_bytes // _tile_bytes(whole) if bits in FAST_WIDTHS else 0
    if room == 0:
        blocks = min(tiles, limits.multiprocessors * (ANY_BLOCKS if whole > 1 else 1))
        settings = (("WHOLE", whole), ("HALF", half), ("THREADS", ANY_THREADS))
        scratch = blocks * (RING + 1) * (65536 >> whole) * 2
        return Launch("viterbi_any.cu", settings, blocks, ANY_THREADS, 0, 0, scratch)
    blocks = min(tiles, limits.multiprocessors)
    group = min(room, _MOST_TILES, -(-tiles // (2 * blocks)))
    scratch = blocks * 2 * group * _STEPS_KEPT.get(whole, RING) * (65536 >> whole) * 2
    settings = (("BITS", whole), ("THREADS", FAST_THREADS))
    return Launch("viterbi.cu", settings, blocks, FAST_THREADS, group, group * _tile_bytes(whole), scratch)


def scratch_bytes(bits: float, tiles: int, device: int = 0) -> int:
    """Bytes of device memory that encoding this many tiles takes beside its inputs and outputs."""
    return plan_launch(tiles, bits, Limits.of(device)).scratch_bytes if tiles else 0


class CudaBackend:
    """Our own kernels, for every width of EXL3."""

    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise EncodeError("the cuda backend needs a CUDA device and torch built for it; use auto or cpu")
        Limits.of(torch.cuda.current_device())
        compiler()

    def prepare(self, widths: Iterable[float]) -> None:
        """Start compiling the kernels that these widths need, in the background, where the cache lacks them."""
        limits = Limits.of(torch.cuda.current_device())
        launches = {(launch.source, launch.settings) for launch in (plan_launch(1, bits, limits) for bits in widths)}
        compile_ahead([("rotate.cu", {}), *((source, dict(settings)) for source, settings in launches)], limits.arch)

    def encode_tiles(self, tiles: Tensor, bits: float) -> Tensor:
        """float32 (T, 256) in ring order, at mul1's scale, to uint16 states (T, 256), on the caller's stream.

        Tiles on the host make the way to the GPU and back. Raises EncodeError for another shape.
        """
        if tiles.ndim != 2 or tiles.shape[1] != RING:
            raise EncodeError(f"tiles must have shape (T, {RING}), found {tuple(tiles.shape)}")
        home, tiles = tiles.device, tiles.to("cuda", torch.float32).contiguous()
        states = torch.empty(tiles.shape, dtype=torch.uint16, device=tiles.device)
        self.search(tiles, None, states, tiles.shape[0], bits)
        return states.to(home)

    def search(
        self,
        targets: Tensor,
        values: Tensor | None,
        states: Tensor,
        tiles: int,
        bits: float,
        strips: Strips = RING_ORDER,
    ) -> None:
        """Find states for tiles in ring order or in strips.

        targets: float32; values: float32 laid out like targets, receives the codebook values (may be the same memory),
        or None; states: 16-bit, in ring order within a tile.
        """
        if tiles == 0:
            return
        launch = plan_launch(tiles, bits, Limits.of(targets.device.index))
        symbol = launch.source.removesuffix(".cu")
        kernel = load_kernel(launch.source, symbol, launch.settings, targets.device.index)
        history = torch.empty(launch.scratch_bytes, dtype=torch.uint8, device=targets.device)
        group = (np.int32(launch.group),) if launch.group else ()
        kernel(
            launch.blocks,
            launch.threads,
            launch.shared_bytes,
            targets.data_ptr(),
            0 if values is None else values.data_ptr(),
            states.data_ptr(),
            history.data_ptr(),
            np.int32(tiles),
            *group,
            np.int32(strips.columns),
            np.int32(strips.row_stride),
            np.int64(strips.strip_stride),
            np.int64(strips.states_stride),
        )
