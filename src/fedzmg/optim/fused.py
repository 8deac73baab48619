"""Tables for the fused kernel, and its launch.

Triton is imported by the first launch, not by ``import fedzmg.optim``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.models.kernels.precision import HAS_TRITON
from fedzmg.optim import updates
from fedzmg.optim.axes import Axes, inputs
from fedzmg.optim.updates import Numbers, Weights

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 2048
"""Entries that a program holds on chip; few, so that several programs run at a time."""
SHORT, WIDTHS = (16, 64), (256, 512, 1024, 2048, 4096)
"""Row lengths held on chip; those of ``WIDTHS`` only if they are aligned."""
TAIL = 8
"""Rows may exceed ``WIDTHS`` by this fraction, as those of 3 x 3 convolutions do (9 = 8 + 1)."""
ALIGNMENT = 16
"""Bytes that a thread reads at a time in aligned rows."""
MAX_ROW = 1 << 16
"""Longer rows are summed by torch, with several programs per row."""
STRIPE = 16
"""Neighbouring columns of a program, for means along columns."""
MAX_COLUMN = 1024
"""Longer columns are summed by torch."""
MAX_ENTRIES = 1 << 31
"""Entries of a tensor whose offsets must fit into 32 bits."""
FLAT, LONG, COLUMNS = 0, 1, 2


_NO_CONTEXT = nullcontext()


class Form(NamedTuple):
    """Memory layout of one tensor for the kernel."""

    shape: int
    """A width of ``WIDTHS`` (rows on chip), ``LONG`` (a row a program), ``COLUMNS`` or ``FLAT``."""
    length: int
    """Entries of a row or column; in a flat tensor, the period of its outputs."""
    rows: int
    """Rows or columns; entries of a flat tensor."""
    inner: int
    """Neighbours in memory that share a mean, in a flat tensor."""
    outputs: int
    inputs: int
    """Entries that share a mean; 0 for a tensor that is not centred."""

    @property
    def tiles(self) -> int:
        """Number of programs for this tensor."""
        heights = {FLAT: TILE, LONG: 1, COLUMNS: STRIPE}
        return -(-self.rows // heights.get(self.shape, TILE // max(self.shape, 1) or 1))

    @property
    def needs_sums(self) -> bool:
        """True if torch computes the sums over the inputs."""
        return self.shape == FLAT and self.inputs > 0


def form_of(
    tensor: Tensor, axes: Axes, *, sums_given: bool = False, aligned: bool = True
) -> Form | None:
    """Return the layout of a tensor, or None if the kernel cannot walk it."""
    return _form_of(tensor.shape, tensor.stride(), axes, sums_given, aligned)


@lru_cache(maxsize=4096)
def _form_of(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: Axes, sums_given: bool, aligned: bool
) -> Form | None:
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    if not updates.without_gaps(shape, strides):
        return None
    entries, count = math.prod(shape), inputs(shape, axes)
    if not axes or not entries:
        return Form(FLAT, max(entries, 1), entries, 1, 1, 0)
    walk = [(axis in axes, shape[axis]) for axis in order if shape[axis] > 1]
    # Neighbouring axes of one kind are one axis.
    runs = [
        (kind, math.prod(size for _, size in each))
        for kind, each in groupby(walk, key=lambda item: item[0])
    ]
    kinds = [kind for kind, _ in runs]
    if not sums_given and kinds in ([], [True], [False], [False, True]) and count <= MAX_ROW:
        return Form(_width(count, aligned), count, entries // count, 1, 1, count)
    if entries >= MAX_ENTRIES:
        return None
    if not sums_given and kinds == [True, False] and count <= MAX_COLUMN:
        return Form(COLUMNS, count, entries // count, 1, 1, count)
    # Outputs, inputs, outputs, inputs: any of them may have length one.
    sizes = [size for _, size in ([] if kinds and not kinds[0] else [(False, 1)]) + runs]
    # Sums are in the order of the axes, entries in the order of memory: both must agree.
    outputs = [axis for axis in order if axis not in axes and shape[axis] > 1]
    if len(sizes) > 4 or outputs != sorted(outputs):
        return None
    _, first, second, inner = sizes + [1] * (4 - len(sizes))
    return Form(FLAT, first * second * inner, entries, inner, second, count)


class Fixed(NamedTuple):
    """Addresses that are constant while no tensor is reallocated."""

    params: list[int]
    velocities: list[int]
    """Addresses of the weights if there is no momentum."""


def _width(length: int, aligned: bool) -> int:
    for width in SHORT:
        if length <= width:
            return width
    if aligned and length % 8 == 0:
        for width in WIDTHS:
            if length <= width + width // TAIL:
                return width
    return LONG


@dataclass
class Plan:
    """Tables of the kernel, valid while no tensor is reallocated."""

    fixed: Fixed
    aligned: list[bool]
    """True for tensors whose three addresses are multiples of ``ALIGNMENT``."""
    ours: list[int]
    others: list[int]
    """Indices of tensors that the kernel cannot walk."""
    forms: list[Form]
    """Layouts of the tensors in ``ours``."""
    plain: bool
    """True if the kernel can walk all tensors and all are contiguous."""
    grads: list[int] = field(default_factory=list)
    """Addresses of all gradients in the last step."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Buffers for the sums that torch computes, by index."""
    moving: list[int] = field(default_factory=list)
    """Addresses of gradients in the table."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    programs: int = 0
    """Number of tiles of all tensors."""
    launches: dict[tuple[bool, ...], Callable[..., object]] = field(default_factory=dict)
    """Compiled kernels by their options."""

    @classmethod
    def of(cls, weights: Weights, fixed: Fixed, aligned: list[bool]) -> Plan:
        """Plan the launch for these tensors."""
        here = weights.local()
        found: dict[int, Form] = {}
        sums: dict[int, Tensor] = {}
        for i, (param, axes) in enumerate(zip(here.params, here.axes, strict=True)):
            split = updates.inputs_sharded(weights.params[i], axes)
            form = form_of(param, axes, sums_given=split, aligned=aligned[i])
            if form is None or here.grads[i].dtype != param.dtype:
                continue
            found[i] = form
            # A process without entries of a tensor still takes part in its sum.
            if form.needs_sums or split:
                outputs = [1 if a in axes else size for a, size in enumerate(param.shape)]
                sums[i] = torch.empty(outputs, dtype=torch.float32, device=param.device)
        others = [i for i in range(len(aligned)) if i not in found]
        plain = not others and all(p.is_contiguous() for p in here.params)
        plan = cls(fixed, aligned, list(found), others, list(found.values()), plain, sums=sums)
        if found:
            plan._build(here.params[0].device)
        return plan

    def _build(self, device: torch.device) -> None:
        rows = [
            [
                self.fixed.params[i],
                self.fixed.velocities[i],
                self.sums[i].data_ptr() if i in self.sums else 0,  # never read where there is none
                *form,
            ]
            for i, form in zip(self.ours, self.forms, strict=True)
        ]
        counts = torch.tensor([form.tiles for form in self.forms])
        tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
        within = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
        tiles = torch.stack([tensor, within], 1).to(torch.int32)
        self.programs = len(tiles)
        self.tables["tiles"] = tiles.contiguous().to(device)
        self.tables["tensors"] = torch.tensor(rows, dtype=torch.int64).to(device)


class Launcher:
    """Launcher of the kernel for one group, which caches tables between steps.

    Launching a step of a small model takes longer in Python than on the GPU.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._recorded: list[Any] = []
        """Tables of captured CUDA graphs; they must live as long as the graphs."""

    def __call__(
        self,
        weights: Weights,
        numbers: Numbers,
        *,
        step: bool = True,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        capturable: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Take a step for tensors of one device and type; ``step=False`` updates only velocities.

        Returns the indices of the tensors that were updated, and of the others.
        """
        here = weights.local()
        grads_at = _addresses(here.grads)
        plan = self._planned(weights, here, grads_at, capturable)
        if not (plan.plain and all(map(Tensor.is_contiguous, here.grads))):
            # Copies stay alive until the kernel is queued; memory is reused in stream order.
            grads = [updates.with_strides_of(here.grads[i], here.params[i]) for i in plan.ours]
            grads_at = _addresses(grads)
        for i, total in plan.sums.items():
            grad, axes = weights.grads[i], weights.axes[i]
            if updates.inputs_sharded(grad, axes):
                total.copy_(updates.sum_of_inputs(grad, axes))
            else:
                torch.sum(updates.local(grad), dim=axes, keepdim=True, dtype=total.dtype, out=total)
        if plan.programs:
            first = here.params[0]
            buffer = bool(here.velocities)
            options = (buffer, numbers.nesterov and buffer, step)
            with _current(first.device):
                table = self._moving(plan, grads_at, first.device)
                _launch(plan, table, first.dtype, numbers, options, scale, found_inf)
        return plan.ours, plan.others

    def _planned(
        self, weights: Weights, here: Weights, grads_at: list[int], capturable: bool
    ) -> Plan:
        params_at = _addresses(here.params)
        fixed = Fixed(params_at, _addresses(here.velocities) or params_at)
        plan = self._plan
        same = plan is not None and plan.fixed == fixed
        if plan is not None and same and plan.grads == grads_at:
            return plan
        aligned = [(w | v | g) % ALIGNMENT == 0 for w, v, g in zip(*fixed, grads_at, strict=True)]
        if plan is None or not same or plan.aligned != aligned:
            plan = self._plan = Plan.of(weights, fixed, aligned)
            if capturable and here.params[0].is_cuda:
                # Compile now: nothing may be compiled while a CUDA graph is captured.
                with _current(here.params[0].device):
                    _write(params_at[:1], here.params[0].device)
        plan.grads = grads_at
        return plan

    def _moving(self, plan: Plan, addresses: list[int], device: torch.device) -> Tensor:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            table = _write(addresses, device)
            self._recorded.append((table, plan))
            return table
        if plan.moving != addresses:
            plan.moving = addresses
            # Pageable memory: the driver has copied it when this returns, so nothing waits.
            plan.tables["moving"] = torch.tensor(addresses, dtype=torch.int64).to(
                device, non_blocking=True
            )
        return plan.tables["moving"]


def _addresses(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _current(device: torch.device) -> Any:
    """Make a device current: Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_CONTEXT
    return torch.cuda.device(device)


def _write(addresses: list[int], device: torch.device) -> Tensor:
    """Make a table without a copy from the host, which a CUDA graph would repeat."""
    from fedzmg.optim.triton_step import HANDED, write

    table = torch.empty(len(addresses), dtype=torch.int64, device=device)
    for first in range(0, len(addresses), HANDED):
        some = addresses[first : first + HANDED]
        # Padded by an address, not by 0, which Triton would give another type.
        padding = [table.data_ptr()] * (HANDED - len(some))
        write[(1,)](table, first, len(some), *some, *padding)
    return table


def _launch(
    plan: Plan,
    moving: Tensor,
    dtype: torch.dtype,
    numbers: Numbers,
    options: tuple[bool, bool, bool],
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    lr, on_device = numbers.lr, isinstance(numbers.lr, Tensor)
    arguments = (
        plan.tables["tiles"], plan.tables["tensors"], moving,
        0.0 if on_device else lr, float(numbers.momentum), numbers.weight_decay,
        float(numbers.sign), lr if on_device else None, scale, found_inf,
    )  # fmt: skip
    # Triton recompiles for tensors of other types and alignments. Our own tables never differ, so
    # the compiled kernel of the last launch can be called directly.
    known = not on_device and scale is None and found_inf is None
    compiled = plan.launches.get(options) if known else None
    if compiled is not None:
        compiled(*arguments, None, *options)  # constants are compiled in and ignored here
        return
    from fedzmg.optim import triton_step

    kernel = triton_step.step[(plan.programs,)](
        *arguments, triton_step.TYPES[dtype], *options, **triton_step.OPTIONS
    )
    if known and kernel is not None:  # the interpreter has none
        plan.launches[options] = kernel[(plan.programs, 1, 1)]


def interpreted() -> bool:
    """Check whether Triton interprets kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def possible(device: torch.device, dtype: torch.dtype) -> bool:
    """Check whether the kernel supports this device and type."""
    return HAS_TRITON and dtype in DTYPES and (device.type == "cuda" or interpreted())
