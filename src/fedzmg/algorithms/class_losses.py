"""Parts of rules that train on their own loss of class scores or features.

Scores of a batch have classes on their last axis. The positions of a sequence are averaged to one
loss per example, as the task's own losses are; targets below zero are padding.
"""

import torch
from torch import Tensor

from fedzmg.errors import InputError
from fedzmg.messages import BatchOutputs


def check_classes(rule: object, batch: BatchOutputs) -> None:
    """Reject a task whose outputs are not one score per class."""
    scores, targets = batch.outputs, batch.targets
    if targets.is_floating_point() or scores.shape[:-1] != targets.shape or scores.shape[-1] < 2:
        raise InputError(
            f"{type(rule).__name__} needs one score per class and whole-number labels; this task "
            f"has outputs of shape {tuple(scores.shape)} and {targets.dtype} targets of shape "
            f"{tuple(targets.shape)}: choose a classification task or another algorithm"
        )


def per_example(values: Tensor, targets: Tensor) -> Tensor:
    """Average values over the positions of an example, padding left out."""
    if values.ndim == 1:
        return values
    if targets.is_floating_point() or targets.shape != values.shape:
        return values.flatten(1).mean(1)
    valid = (targets >= 0).flatten(1)
    return torch.where(valid, values.flatten(1), 0.0).sum(1) / valid.sum(1).clamp(min=1)
