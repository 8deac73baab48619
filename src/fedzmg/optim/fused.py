"""Tables for the fused kernel, and its launch, which imports Triton."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.kernels.precision import HAS_TRITON
from fedzmg.models.layout import Axes
from fedzmg.optim import updates
from fedzmg.optim.updates import Options, Weights, inputs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 2048  # entries that a program holds on chip; few, so that several programs run at a time
SHORT, WIDTHS = (16, 64), (256, 512, 1024, 2048, 4096)  # row lengths on chip; WIDTHS if aligned
TAIL = 8  # rows may exceed WIDTHS by this fraction, as those of 3 x 3 convolutions do (9 = 8 + 1)
ALIGNMENT = 16  # bytes that a thread reads at a time in aligned rows
MAX_ROW = 1 << 16  # longer rows are summed by torch, with several programs per row
STRIPE = 16  # neighbouring columns of a program, for means along columns
MAX_COLUMN = 1024  # longer columns are summed by torch
MAX_ENTRIES = 1 << 31  # entries of a tensor whose offsets must fit into 32 bits
FLAT, LONG, COLUMNS = 0, 1, 2
_NO_CONTEXT = nullcontext()


class Form(NamedTuple):
    """Memory layout of one tensor for the kernel."""

    shape: int  # a width (rows on chip), LONG (a row a program), COLUMNS or FLAT
    length: int  # of a row or column; in a flat tensor, the period of its outputs
    rows: int  # or columns; entries of a flat tensor
    inner: int  # neighbours in memory that share a mean, in a flat tensor
    outputs: int
    inputs: int  # entries that share a mean; 0 for a tensor that is not centred

    @property
    def tiles(self) -> int:
        """Number of programs for this tensor."""
        heights = {FLAT: TILE, LONG: 1, COLUMNS: STRIPE}
        return -(-self.rows // heights.get(self.shape, TILE // max(self.shape, 1) or 1))


def form_of(
    tensor: Tensor, axes: Axes, *, sums_given: bool = False, aligned: bool = True
) -> Form | None:
    """Return the layout of a tensor, or None if the kernel cannot walk it."""
    if not updates.without_gaps(tensor):
        return None
    shape, strides = tensor.shape, tensor.stride()
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    entries, count = math.prod(shape), inputs(shape, axes)
    if not axes or not entries:
        return Form(FLAT, max(entries, 1), entries, 1, 1, 0)
    walk = [(axis in axes, shape[axis]) for axis in order if shape[axis] > 1]
    # Neighbouring axes of one kind are one axis.
    groups = groupby(walk, key=lambda item: item[0])
    runs = [(kind, math.prod(size for _, size in each)) for kind, each in groups]
    kinds = [kind for kind, _ in runs]
    if not sums_given and kinds in ([], [True], [False], [False, True]) and count <= MAX_ROW:
        widths = [width for width in SHORT if count <= width]
        if aligned and count % 8 == 0:
            widths += [width for width in WIDTHS if count <= width + width // TAIL]
        return Form(min(widths, default=LONG), count, entries // count, 1, 1, count)
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


class Plan:
    """Tables of the kernel, valid while no tensor is reallocated."""

    def __init__(self, weights: Weights, fixed: list[list[int]], aligned: list[bool]) -> None:
        self.fixed = fixed  # addresses of weights and velocities, or of weights twice
        self.aligned = aligned  # True for tensors with addresses in multiples of ALIGNMENT
        self.ours: list[int] = []  # indices of tensors that the kernel can walk
        self.grads: list[int] = []  # addresses of all gradients in the last step
        self.sums: dict[int, Tensor] = {}  # buffers for sums that torch computes, by index
        self.listed: list[int] = []  # addresses of gradients in moving
        self.launches: dict[bool, Callable[..., object]] = {}  # compiled kernels by nesterov
        here, rows, tiles = weights.local(), [], []
        self.dtype, self.buffer = here.params[0].dtype, bool(here.velocities)
        for i, (param, axes) in enumerate(zip(here.params, here.axes, strict=True)):
            split = updates.inputs_sharded(weights.params[i], axes)
            form = form_of(param, axes, sums_given=split, aligned=aligned[i])
            if form is None or here.grads[i].dtype != param.dtype:
                continue
            self.ours.append(i)
            # torch computes these sums. A process without entries of a tensor still takes part.
            if split or (form.shape == FLAT and form.inputs):
                outputs = [1 if a in axes else size for a, size in enumerate(param.shape)]
                self.sums[i] = torch.empty(outputs, dtype=torch.float32, device=param.device)
            sums_at = self.sums[i].data_ptr() if i in self.sums else 0  # 0 is never read
            rows.append([fixed[0][i], fixed[1][i], sums_at, *form])
            tiles.append(form.tiles)
        self.others = [i for i in range(len(aligned)) if i not in self.ours]
        self.plain = not self.others and all(p.is_contiguous() for p in here.params)
        counts = torch.tensor(tiles, dtype=torch.int64)
        tensor = torch.repeat_interleave(counts)
        within = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
        device = here.params[0].device
        self.tiles = torch.stack([tensor, within], 1).to(device, torch.int32)
        self.tensors = torch.tensor(rows, dtype=torch.int64).to(device)
        self.moving = self.tensors


class Launcher:
    """Launcher of the kernel for one group; caches tables, for Python takes longer than a GPU."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._recorded: list[Any] = []  # tables of captured CUDA graphs, alive as long as these

    def __call__(
        self, weights: Weights, options: Options, scale: Tensor | None, found_inf: Tensor | None
    ) -> list[int]:
        """Take a step for tensors of one device and type; return the indices of those left out."""
        here = weights.local()
        grads_at = _addresses(here.grads)
        plan = self._planned(weights, here, grads_at, options["capturable"])
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
        if len(plan.tiles):
            device = here.params[0].device
            with _current(device):
                _launch(plan, self._moving(plan, grads_at, device), options, scale, found_inf)
        return plan.others

    def _planned(self, weights: Weights, here: Weights, grads: list[int], capturable: bool) -> Plan:
        params_at = _addresses(here.params)
        fixed = [params_at, _addresses(here.velocities) or params_at]
        plan = self._plan
        if plan is not None and plan.fixed == fixed and plan.grads == grads:
            return plan
        aligned = [(w | v | g) % ALIGNMENT == 0 for w, v, g in zip(*fixed, grads, strict=True)]
        if plan is None or plan.fixed != fixed or plan.aligned != aligned:
            plan = self._plan = Plan(weights, fixed, aligned)
            if capturable and here.params[0].is_cuda:
                # Compile now: nothing may be compiled while a CUDA graph is captured.
                with _current(here.params[0].device):
                    _write(params_at[:1], here.params[0].device)
        plan.grads = grads
        return plan

    def _moving(self, plan: Plan, addresses: list[int], device: torch.device) -> Tensor:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            table = _write(addresses, device)
            self._recorded.append((table, plan))
            return table
        if plan.listed != addresses:
            plan.listed = addresses
            # Pageable memory: the driver has copied it when this returns, so nothing waits.
            table = torch.tensor(addresses, dtype=torch.int64)
            plan.moving = table.to(device, non_blocking=True)
        return plan.moving


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

    # Padded by an address, not by 0, which Triton would give another type.
    padded = addresses + addresses[:1] * (-len(addresses) % HANDED)
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for first in range(0, len(padded), HANDED):
        write[(1,)](table[first:], *padded[first : first + HANDED])
    return table


def _launch(
    plan: Plan, moving: Tensor, options: Options, scale: Tensor | None, found_inf: Tensor | None
) -> None:
    lr, on_device = options["lr"], isinstance(options["lr"], Tensor)
    arguments = (
        plan.tiles, plan.tensors, moving, 0.0 if on_device else lr, float(options["momentum"]),
        float(options["weight_decay"]), -1.0 if options["maximize"] else 1.0,
        lr if on_device else None, scale, found_inf,
    )  # fmt: skip
    nesterov = options["nesterov"] and plan.buffer
    # Triton recompiles for tensors of other types and alignments. Our own tables never differ, so
    # the compiled kernel of the last launch can be called directly.
    known = not on_device and scale is None and found_inf is None
    compiled = plan.launches.get(nesterov) if known else None
    if compiled is not None:
        compiled(*arguments, None, plan.buffer, nesterov)  # constants are compiled in
        return
    from fedzmg.optim import triton_step

    grid = (len(plan.tiles), 1, 1)
    kernel = triton_step.step[grid](
        *arguments, triton_step.TYPES[plan.dtype], plan.buffer, nesterov, **triton_step.OPTIONS
    )
    if known and kernel is not None:  # the interpreter has none
        plan.launches[nesterov] = kernel[grid]


def possible(device: torch.device, dtype: torch.dtype) -> bool:
    """Check whether the kernel supports this device and type, or Triton's interpreter runs."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return HAS_TRITON and dtype in DTYPES and (device.type == "cuda" or interpreted)
