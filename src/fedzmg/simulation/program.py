"""The program of engines: a task and a rule, with the values that the rule asks for."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedzmg.contract import ClientRule, chain
from fedzmg.engine.local import Program
from fedzmg.errors import InputError
from fedzmg.kernels.precision import Precision
from fedzmg.tasks.task import Task


def build_program(
    task: Task, rule: ClientRule, dtype: torch.dtype, device: torch.device,
    precision: Precision = "float32", longest: int = 0,
) -> Program:  # fmt: skip
    """Build what engines need to train clients of a task by a rule."""
    labels = label_counts(task, rule, device)  # first: it may split the head off the model
    half = torch.bfloat16 if precision == "bf16" and device.type == "cuda" else None
    return Program(
        rule=rule, objective=replace(task.objective.to(device, dtype), layers_in=half),
        data=task.train.to(device, dtype), prepare=task.prepare, dtype=dtype, device=device,
        longest=longest, label_counts=labels,
    )  # fmt: skip


def label_counts(task: Task, rule: ClientRule, device: torch.device) -> Tensor | tuple[()]:
    """Count the examples of each class by client, if a rule needs it; check its other needs."""
    params, few, _ = task.prepared(task.train.examples)
    if "features" in rule.needs:
        task.model.check_features(params, few)
    if "label_counts" not in rule.needs:
        return ()
    outputs, y = task.model.evaluate(params, few), task.train.examples.y
    if y.is_floating_point() or y.ndim != 1 or outputs.ndim != 2:
        name = [type(r).__name__ for r in chain(rule) if "label_counts" in r.needs][-1]
        problem = f"{name} counts labels, but {task.name} has no class for every example"
        raise InputError(f"{problem}: choose a classification task or another algorithm")
    owners = torch.from_numpy(np.repeat(np.arange(len(task.train)), task.train.counts))
    found = torch.zeros(len(task.train), outputs.shape[1], dtype=torch.int64)
    here, y = y.cpu() >= 0, y.cpu()  # the loss ignores negative labels
    found.index_put_((owners[here], y[here]), torch.tensor(1), accumulate=True)
    return found.to(device)
