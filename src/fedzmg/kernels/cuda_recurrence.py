"""Recurrent layers in one launch, on GPUs whose shared memory holds the weights of a layer.

:mod:`triton_recurrence` reads all weights from memory at every time step. Here blocks keep them,
and exchange states through the cache (``cuda_recurrence.cu``).
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OWN, WARPS, PADDING = 32, 8, 4  # as in cuda_recurrence.cu
FORWARD, BACKWARD = 0, 1
STEP, READ = 3.0, 2.5e6  # on an H200: us of a time step here; bytes per us of the other kernels


@dataclass(frozen=True)
class Recurrence:
    """Kernels of one size of layer, and how they are launched."""

    units: int
    gates: int  # 3: GRU, 4: LSTM
    tiles: int  # of eight examples
    float16: bool
    device: int

    def launch(self, kernel: int, given: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Launch a kernel of ``cuda_recurrence.cu`` for so many clients, time steps and examples.

        ``given`` are its arrays, but for those in which blocks exchange what they have computed.
        """
        from cuda.bindings import driver

        clients, steps, _ = sizes
        each = (0.5,) if kernel == FORWARD else (self.gates / 2, 1 / OWN)  # words of a unit
        room = [clients * steps * 8 * self.tiles * int(self.units * words) for words in each]
        sent = [torch.full((n,), -1, dtype=torch.int32, device=self.device) for n in room]
        arrays = *given, *sent
        values = *(t.data_ptr() for t in arrays), *sizes
        types = *[ctypes.c_void_p] * len(arrays), *[ctypes.c_int] * len(sizes)
        grid = min(clients, self.slots) * self.units // OWN, 1, 1, 32 * WARPS, 1, 1
        stream, function = torch.cuda.current_stream().cuda_stream, self.functions[kernel]
        parameters = self.shared, stream, (values, types)
        _checked(driver.cuLaunchCooperativeKernel(function, *grid, *parameters))

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: weights, and totals of its warps."""
        rows = self.gates * OWN
        return 2 * rows * self.units + 4 * WARPS * 8 * self.tiles * (rows + PADDING)

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks that run on one multiprocessor at a time."""
        properties = torch.cuda.get_device_properties(self.device)
        most = getattr(properties, "shared_memory_per_block_optin", 0)  # known of NVIDIA alone
        if self.shared > most:
            return 0
        two = 2 * (self.shared + 1024) <= properties.shared_memory_per_multiprocessor
        return 2 if two and self.tiles == 1 else 1

    @functools.cached_property
    def slots(self) -> int:
        """Clients that train at a time."""
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return self.blocks * processors // (self.units // OWN)

    @functools.cached_property
    def functions(self) -> list[Any]:
        """Compiled kernels, forward and backward."""
        from cuda.bindings import driver, nvrtc

        properties = torch.cuda.get_device_properties(self.device)
        defined = {"UNITS": self.units, "GATES": self.gates, "TILES": self.tiles}
        defined |= {"BLOCKS": self.blocks, "FLOAT16": int(self.float16)}
        options = [f"-D{name}={value}".encode() for name, value in defined.items()]
        options.append(f"--gpu-architecture=sm_{properties.major}{properties.minor}".encode())
        source = Path(__file__).with_suffix(".cu").read_bytes()
        program = _checked(nvrtc.nvrtcCreateProgram(source, b"cuda_recurrence.cu", 0, [], []))
        _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        binary = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, binary))
        module = _checked(driver.cuModuleLoadData(binary))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        found = []
        for name in (b"recurrence_forward", b"recurrence_backward"):
            found.append(_checked(driver.cuModuleGetFunction(module, name)))
            _checked(driver.cuFuncSetAttribute(found[-1], most, self.shared))
        return found


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return the value of a call of CUDA, or raise its error."""
    error, *values = answer
    if int(error):
        raise RuntimeError(error.name)
    return values[0] if values else None


def recurrence_for(weights: Tensor, batch: int) -> Recurrence | None:
    """Return kernels for weights ``[clients, gates * units, units]`` if they are faster."""
    clients, width, units = weights.shape
    if not weights.is_cuda or weights.element_size() != 2 or units % OWN:
        return None
    float16, place = weights.dtype == torch.float16, weights.get_device()
    if (found := _built(units, width // units, math.ceil(batch / 8), float16, place)) is None:
        return None
    here, there = math.ceil(clients / found.slots) * STEP, STEP + 2 * weights.numel() / READ
    return found if here <= there else None


@functools.cache
def _built(units: int, gates: int, tiles: int, float16: bool, device: int) -> Recurrence | None:
    made = Recurrence(units, gates, tiles, float16, device)
    if tiles > 4 or not made.slots or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        return made if made.functions else None
    except (ImportError, RuntimeError):  # torch for another GPU, or without CUDA's compiler
        return None
