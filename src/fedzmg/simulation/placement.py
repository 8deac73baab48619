"""A task on the devices that train it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from fedzmg.contract import ClientRule
from fedzmg.data.federated import Examples
from fedzmg.engine.round import Program
from fedzmg.models.kernels.precision import Precision
from fedzmg.simulation import devices
from fedzmg.tasks.task import Task


class Placed(NamedTuple):
    """What of a task lies on devices."""

    program: Program
    """Local training on the device of the simulation."""
    elsewhere: list[Program]
    """The same on every other device that shares the clients."""
    test: Examples


def place(
    task: Task, rule: ClientRule, device: torch.device, dtype: torch.dtype, precision: Precision
) -> Placed:
    """Copy a task's model and data to a device, and to those that help it."""
    half = torch.bfloat16 if precision == "bf16" and device.type == "cuda" else None
    objective = replace(task.objective, model=task.model.to(device, dtype), layers_in=half)
    program = Program(
        rule=rule,
        objective=objective,
        data=task.train.to(device),
        prepare=task.prepare,
        dtype=dtype,
        device=device,
        longest=task.protocol.batching.steps(int(task.train.counts.max())),
    )
    elsewhere = [
        replace(
            program,
            objective=replace(objective, model=task.model.to(other, dtype)),
            data=task.train.to(other),
            device=other,
        )
        for other in devices.other_devices(device)
    ]
    test = type(task.test)(*(column.to(device) for column in task.test))
    return Placed(program, elsewhere, test)
