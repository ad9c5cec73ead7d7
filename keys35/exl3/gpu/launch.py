"""Loads a compiled kernel onto a torch device and launches it on torch's current stream."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...errors import EncodeError
from .compile import OLDEST_CAPABILITY, cached_cubin


@dataclass(frozen=True)
class Limits:
    """What of a device shapes a launch."""

    arch: str
    multiprocessors: int
    shared_bytes: int
    shared_total: int = 100 * 1024
    """Shared memory of a multiprocessor."""

    @staticmethod
    @lru_cache
    def of(device: int) -> "Limits":
        """Read a device's limits; raises EncodeError when our kernels do not run on it."""
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        if capability < OLDEST_CAPABILITY:
            raise EncodeError(
                f"{properties.name} has compute capability {capability[0]}.{capability[1]}; the CUDA encoder needs "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or later: use the cpu or exllamav3 backend"
            )
        shared = getattr(properties, "shared_memory_per_block_optin", 0) or 99 * 1024
        total = getattr(properties, "shared_memory_per_multiprocessor", 0) or 100 * 1024
        return Limits(f"sm_{capability[0]}{capability[1]}", properties.multi_processor_count, shared, total)


class Kernel:
    """One kernel on one device."""

    def __init__(self, source: str, symbol: str, defines: tuple[tuple[str, int], ...], device: int):
        from cuda.core import Device, ObjectCode

        with torch.cuda.device(device):
            torch.cuda.current_stream()  # torch's context first: cuda-core then shares it
            Device(device).set_current()
            code = cached_cubin(source, Limits.of(device).arch, dict(defines))
            self._module = ObjectCode.from_cubin(code)
            self._kernel = self._module.get_kernel(symbol)
        self._device = device
        self._shared = 0

    def __call__(
        self, grid: int | tuple[int, int, int], threads: int, shared: int, *arguments: Any, cooperative: bool = False
    ) -> None:
        """Launch on torch's current stream; pointers are Python ints, other arguments numpy or ctypes scalars.

        cooperative: the driver refuses a grid whose blocks cannot all be there at once.
        """
        from cuda.core import LaunchConfig, Stream, launch

        self._allow(shared)
        stream = Stream.from_handle(torch.cuda.current_stream(self._device).cuda_stream)
        config = LaunchConfig(grid=grid, block=threads, shmem_size=shared, is_cooperative=cooperative)
        launch(stream, config, self._kernel, *arguments)

    def _allow(self, shared: int) -> None:
        """Raise the kernel's shared memory limit; a launch without this may use 48 KiB."""
        if shared <= max(self._shared, 48 * 1024):
            return
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = driver.CUkernel(int(self._kernel.handle))
        (error,) = driver.cuKernelSetAttribute(attribute, shared, handle, driver.CUdevice(self._device))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise EncodeError(f"the GPU refuses {shared} bytes of shared memory a block ({error.name})")
        self._shared = shared


@lru_cache
def load_kernel(source: str, symbol: str, defines: tuple[tuple[str, int], ...], device: int) -> Kernel:
    """The kernel for a device, compiled on first use."""
    return Kernel(source, symbol, defines, device)
