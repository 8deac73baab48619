"""What the fused kernel needs to know about a group, and the launch itself.

``import fedzmg.optim`` needs no Triton: the kernels are imported by the first launch.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.optim.axes import Axes, inputs
from fedzmg.optim.memory import laid_like, without_gaps
from fedzmg.optim.projection import sum_of_inputs
from fedzmg.optim.shards import splits_inputs
from fedzmg.optim.updates import Numbers, Weights

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 4096
"""Entries that a program holds on chip, as rows."""
SHORT, WIDTHS = (16, 64), (256, 1024, 4096, 8192)
"""Row lengths that the kernel holds on chip; those of ``WIDTHS`` only if they are aligned."""
ALIGNMENT = 16
"""Bytes that a thread reads at a time where all rows begin at a multiple of it."""
TOO_LONG = 1 << 16
"""Rows beyond this are summed by torch, which sets more than one program to a row."""
FLAT, LONG = 0, 1


class Form(NamedTuple):
    """How one tensor lies in memory, as the kernel sees it."""

    shape: int
    """A width of ``WIDTHS`` (rows on chip), ``LONG`` (a row a program) or ``FLAT``."""
    length: int
    """Entries of a row; of a flat tensor, entries after which its outputs begin anew."""
    rows: int
    """Rows; entries of a flat tensor."""
    inner: int
    """Neighbours in memory that share a mean, in a flat tensor."""
    outputs: int
    inputs: int
    """Entries that share a mean; 0 for a tensor that is not centred."""

    @property
    def tiles(self) -> int:
        """Programs that this tensor takes."""
        if self.shape == LONG:
            return self.rows
        height = TILE if self.shape == FLAT else max(1, TILE // self.shape)
        return -(-self.rows // height)

    @property
    def needs_sums(self) -> bool:
        """Whether sums over the inputs come from outside."""
        return self.shape == FLAT and self.inputs > 0


def form_of(
    tensor: Tensor, axes: Axes, *, sums_given: bool = False, aligned: bool = True
) -> Form | None:
    """The form of a tensor in memory; None if the kernel cannot walk it."""
    return _form_of(tensor.shape, tensor.stride(), axes, sums_given, aligned)


@lru_cache(maxsize=4096)
def _form_of(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: Axes, sums_given: bool, aligned: bool
) -> Form | None:
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    if not without_gaps(shape, strides):
        return None
    entries, count = math.prod(shape), inputs(shape, axes)
    if not axes or not entries:
        return Form(FLAT, max(entries, 1), entries, 1, 1, 0)
    walk = [(axis in axes, shape[axis]) for axis in order if shape[axis] > 1]
    # Axes of one kind that follow each other in memory are one axis.
    runs = [
        (kind, math.prod(size for _, size in each))
        for kind, each in groupby(walk, key=lambda item: item[0])
    ]
    kinds = [kind for kind, _ in runs]
    if not sums_given and kinds in ([], [True], [False], [False, True]) and count <= TOO_LONG:
        widths = SHORT + WIDTHS if aligned and count % 8 == 0 else SHORT
        width = next((w for w in widths if count <= w), LONG)
        return Form(width, count, entries // count, 1, 1, count)
    # Outputs, inputs, outputs, inputs: any of them may have length one.
    sizes = [size for _, size in ([] if kinds and not kinds[0] else [(False, 1)]) + runs]
    # Sums lie in the order of the axes, entries in the order of memory: both must agree.
    outputs = [axis for axis in order if axis not in axes and shape[axis] > 1]
    if len(sizes) > 4 or outputs != sorted(outputs):
        return None
    _, first, second, inner = sizes + [1] * (4 - len(sizes))
    return Form(FLAT, first * second * inner, entries, inner, second, count)


@dataclass
class Plan:
    """What stays while no tensor moves: which ones the kernel does, and its tables."""

    fixed: tuple[list[int], list[int]]
    """Addresses of weights and of velocities."""
    aligned: list[bool]
    """Whether a tensor's three addresses are multiples of ``ALIGNMENT``."""
    ours: list[int]
    others: list[int]
    """Places of tensors that the kernel cannot walk."""
    forms: list[Form]
    """Of ours."""
    plain: bool
    """Whether all are ours and lie in the order of their axes."""
    grads: list[int] = field(default_factory=list)
    """Addresses of all gradients in the last step."""
    moving: list[int] = field(default_factory=list)
    """Addresses of our gradients, then of our sums, as they are in the table."""
    tables: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: Weights, fixed: tuple[list[int], list[int]], aligned: list[bool]) -> Plan:
        """Look at every tensor once."""
        here = weights.local()
        found: dict[int, Form] = {}
        for i, (param, axes) in enumerate(zip(here.params, here.axes, strict=True)):
            split = splits_inputs(weights.params[i], axes)
            form = form_of(param, axes, sums_given=split, aligned=aligned[i])
            if form is not None and here.grads[i].dtype == param.dtype:
                found[i] = form
        others = [i for i in range(len(aligned)) if i not in found]
        plain = not others and all(p.is_contiguous() for p in here.params)
        plan = cls(fixed, aligned, list(found), others, list(found.values()), plain)
        if found:
            plan._build(here.params[0].device)
        return plan

    def _build(self, device: torch.device) -> None:
        rows = [
            [self.fixed[0][i], self.fixed[1][i], *form]
            for i, form in zip(self.ours, self.forms, strict=True)
        ]
        counts = torch.tensor([form.tiles for form in self.forms])
        tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
        within = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
        tiles = torch.stack([tensor, within], 1).to(torch.int32)
        self.tables["tiles"] = tiles.contiguous().to(device)
        self.tables["tensors"] = torch.tensor(rows, dtype=torch.int64).to(device)


class Launcher:
    """Launches the kernel for one group and keeps its tables while nothing moves.

    A step of a small model takes less time on a GPU than Python takes to ask for it, so what does
    not change is not looked at again.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._recorded: list[Any] = []
        """Tables that recorded graphs read; they must live as long as the graphs."""

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
        """One step of tensors on one device and of one type; ``step=False`` updates velocities.

        Returns the places of the tensors that were done, and of those that could not be.
        """
        here = weights.local()
        device = here.params[0].device
        grads_at = [g.data_ptr() for g in here.grads]
        plan = self._planned(weights, here, grads_at, capturable)
        grads = [here.grads[i] for i in plan.ours]
        if not (plan.plain and all(map(Tensor.is_contiguous, grads))):
            grads = [laid_like(here.grads[i], here.params[i]) for i in plan.ours]
            grads_at = [g.data_ptr() for g in grads]
        sums = {
            place: sum_of_inputs(weights.grads[i], weights.axes[i]).contiguous().float()
            for place, (i, form) in enumerate(zip(plan.ours, plan.forms, strict=True))
            if form.needs_sums
        }
        sums_at = list(grads_at)  # never read where there is no sum
        for place, total in sums.items():
            sums_at[place] = total.data_ptr()
        if plan.ours and len(plan.tables["tiles"]):
            table = self._moving(plan, grads_at + sums_at, device)
            _launch(plan, table, here.params[0].dtype, bool(here.velocities), numbers, step, scale,
                    found_inf)  # fmt: skip
        return plan.ours, plan.others

    def _planned(
        self, weights: Weights, here: Weights, grads_at: list[int], capturable: bool
    ) -> Plan:
        params_at = [p.data_ptr() for p in here.params]
        velocities_at = [v.data_ptr() for v in here.velocities] or params_at
        plan = self._plan
        same = plan is not None and plan.fixed == (params_at, velocities_at)
        if plan is not None and same and plan.grads == grads_at:
            return plan
        aligned = [
            (w | v | g) % ALIGNMENT == 0
            for w, v, g in zip(params_at, velocities_at, grads_at, strict=True)
        ]
        if plan is None or not same or plan.aligned != aligned:
            plan = self._plan = Plan.of(weights, (params_at, velocities_at), aligned)
            if capturable and here.params[0].is_cuda:
                # Compiled now, since nothing may be while a graph is recorded.
                _write(params_at[:1], here.params[0].device)
        plan.grads = grads_at
        return plan

    def _moving(self, plan: Plan, addresses: list[int], device: torch.device) -> Tensor:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            table = _write(addresses, device)
            self._recorded.append((table, plan.tables))
            return table
        if plan.moving != addresses:
            plan.moving = addresses
            # Pageable memory: the driver has taken its copy when this returns, so nothing waits.
            plan.tables["moving"] = torch.tensor(addresses, dtype=torch.int64).to(
                device, non_blocking=True
            )
        return plan.tables["moving"]


def _write(addresses: list[int], device: torch.device) -> Tensor:
    """A table made without a copy from the host, which a recorded graph would repeat."""
    from fedzmg.optim.triton_step import HANDED, write

    table = torch.empty(len(addresses), dtype=torch.int64, device=device)
    for first in range(0, len(addresses), HANDED):
        some = addresses[first : first + HANDED]
        # Padded by an address, not by 0: small numbers would be of another type.
        padding = [table.data_ptr()] * (HANDED - len(some))
        write[(1,)](table, first, len(some), *some, *padding)
    return table


def _launch(
    plan: Plan,
    moving: Tensor,
    dtype: torch.dtype,
    buffer: bool,
    numbers: Numbers,
    step: bool,
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    import triton.language as tl

    from fedzmg.optim import triton_step

    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    tiles = plan.tables["tiles"]
    on_device = isinstance(numbers.lr, Tensor)
    triton_step.step[(len(tiles),)](
        tiles, plan.tables["tensors"], moving, len(plan.ours),
        0.0 if on_device else numbers.lr, numbers.lr if on_device else tiles,
        numbers.momentum, numbers.weight_decay, float(numbers.sign),
        tiles if scale is None else scale, tiles if found_inf is None else found_inf,
        DTYPE=names[dtype], COLUMNS=triton_step.COLUMNS, TILE=TILE,
        LR_AT=on_device, SCALED=scale is not None, GUARDED=found_inf is not None,
        BUFFER=buffer, NESTEROV=numbers.nesterov and buffer, STEP=step,
        num_warps=triton_step.WARPS,
    )  # fmt: skip


def interpreted() -> bool:
    """Whether Triton runs kernels on a processor, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def possible(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel can run for tensors of this kind at all."""
    return HAS_TRITON and dtype in DTYPES and (device.type == "cuda" or interpreted())
