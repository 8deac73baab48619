"""Device selection, and the copy of a task to a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch

from fedzmg.contract import ClientRule
from fedzmg.data.federated import Examples
from fedzmg.engine.local import Program
from fedzmg.errors import InputError, unknown
from fedzmg.models.kernels.precision import Precision
from fedzmg.tasks.task import Task

Device = Literal["auto", "cpu", "cuda"]


def has_gpu() -> bool:
    """Tell whether this machine has a CUDA device."""
    return torch.cuda.is_available()


def resolve_device(device: str) -> torch.device:
    """Return the named device; ``auto`` is a GPU if there is one."""
    if device not in get_args(Device):
        raise unknown("device", device, get_args(Device))
    if device == "cuda" and not has_gpu():
        raise InputError("device 'cuda': no CUDA device is available here; use --device cpu")
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    return torch.device(device)


def place(
    task: Task, rule: ClientRule, device: torch.device, dtype: torch.dtype, precision: Precision
) -> tuple[Program, Examples]:
    """Copy a task to a device, in the precision of the training; return also its test examples."""
    half = torch.bfloat16 if precision == "bf16" and device.type == "cuda" else None
    program = Program(
        rule=rule,
        objective=replace(task.objective, model=task.model.to(device, dtype), layers_in=half),
        data=task.train.to(device, dtype),
        prepare=task.prepare,
        dtype=dtype,
        device=device,
        longest=task.protocol.batching.steps(int(task.train.counts.max())),
    )
    return program, task.test.to(device, dtype)
