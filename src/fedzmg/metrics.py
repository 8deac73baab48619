"""Ready-made metrics of logits, classes last (axis 1 of images); negative targets are ignored."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedzmg.errors import InputError, check_names
from fedzmg.evaluation import ACCURACY, Metric
from fedzmg.models import objective
from fedzmg.models.objective import LOSSES, LossFunction


def _class_columns(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits as examples x positions x classes, and a label per position."""
    last = outputs.movedim(1, -1) if outputs.ndim > 3 else outputs
    return last.reshape(len(last), -1, last.shape[-1]), targets.reshape(len(targets), -1)


def _label_columns(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return logits, wanted and valid labels as examples x positions x labels; True: exclusive."""
    if exclusive := outputs.numel() != targets.numel():
        logits, labels = _class_columns(outputs, targets)
        labels = labels[..., None]
        wanted = labels == torch.arange(logits.shape[-1], device=logits.device)
        return logits, wanted, labels >= 0, exclusive
    both = (outputs, targets.reshape(outputs.shape))
    columns = (values if values.ndim > 1 else values[:, None] for values in both)
    logits, labels = (_class_columns(values, targets)[0] for values in columns)
    return logits, labels > 0, labels >= 0, exclusive


def confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    """Count true positives, false positives and false negatives of each label, by example."""
    logits, wanted, valid, exclusive = _label_columns(outputs, targets)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    predicted = logits.argmax(-1, keepdim=True) == classes if exclusive else logits > 0
    cases = predicted & wanted, predicted & ~wanted & valid, ~predicted & wanted
    return torch.cat([case.sum(1) for case in cases], -1)


def _macro(counts: Tensor, score: Callable[..., Tensor]) -> Tensor:
    """Average a score over the labels that occur in targets or predictions."""
    cases = counts.chunk(3, -1)
    occurs = torch.stack(cases).sum(0) > 0
    return (score(*cases) * occurs).sum(-1) / occurs.sum(-1).clamp(min=1)


def _f1(true: Tensor, false: Tensor, missed: Tensor) -> Tensor:
    return 2 * true / (2 * true + false + missed).clamp(min=1)


def _iou(true: Tensor, false: Tensor, missed: Tensor) -> Tensor:
    return true / (true + false + missed).clamp(min=1)


def ratio(sums: Tensor) -> Tensor:
    """Divide the first sum by the second."""
    return sums[..., 0] / sums[..., 1].clamp(min=1)


def binary_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the share of right labels per example; an output is a logit of one label."""
    labels = targets.reshape(outputs.shape)
    right = ((outputs > 0) == (labels > 0)) & (labels >= 0)
    return objective.mean_of_each(right.to(outputs.dtype), labels >= 0)


def masked_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute each example's accuracy over the positions that have a target."""
    valid = targets >= 0
    right = (valid & (outputs.argmax(-1) == targets)).flatten(1).sum(1)
    return right.to(outputs.dtype) / valid.flatten(1).sum(1).clamp(min=1)


def right_positions(outputs: Tensor, targets: Tensor) -> Tensor:
    """Count right and valid positions of each example."""
    logits, labels = _class_columns(outputs, targets)
    return torch.stack([(logits.argmax(-1) == labels).sum(1), (labels >= 0).sum(1)], -1)


def in_top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """Count an example's targets among the five largest outputs, and all of them."""
    logits, labels = _class_columns(outputs, targets)
    best = logits.topk(min(5, logits.shape[-1]), -1).indices
    right = (best == labels[..., None]).any(-1)
    return torch.stack([right.sum(1), (labels >= 0).sum(1)], -1)


def token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy of each example's positions, and count the positions."""
    logits, labels = _class_columns(outputs, targets)
    valid = labels >= 0
    wanted = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    losses = torch.where(valid, logits.logsumexp(-1) - wanted, 0.0)
    return torch.stack([losses.sum(1), valid.sum(1)], -1)


def perplexity(sums: Tensor) -> Tensor:
    """Compute the exponential of the mean cross-entropy over positions."""
    return ratio(sums).exp()


def _shifted(function: LossFunction) -> LossFunction:
    """Compare outputs with the next targets, which are the input ids."""
    return lambda outputs, targets: function(outputs[:, :-1], targets[:, 1:])


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = objective.squared_error(outputs, targets)
    return torch.stack([errors, torch.ones_like(errors)], -1)


def scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a score and a truth value for each label (-1: ignored) of each example."""
    logits, wanted, valid, exclusive = _label_columns(outputs, targets)
    labels = torch.where(valid, wanted.to(logits.dtype), -1)
    if exclusive and logits.shape[-1] == 2:
        logits, labels = logits[..., 1:] - logits[..., :1], labels[..., 1:]
    elif exclusive:
        logits = logits.softmax(-1)
    return torch.cat([logits.flatten(1), labels.flatten(1)], -1)


def area_under_curve(rows: Tensor) -> Tensor:
    """Compute the mean area under the ROC curve over labels with both values, by mean ranks."""
    score, label = (part.T.contiguous() for part in rows.double().chunk(2, -1))
    # Ignored examples rank below all others.
    score = torch.where(label >= 0, score, -torch.inf)
    ordered = score.sort(-1).values
    below = torch.searchsorted(ordered, score)
    up_to = torch.searchsorted(ordered, score, right=True)
    # Twice the rank is a whole number, and exact.
    rank = below + up_to + 1 - 2 * (label < 0).sum(-1, keepdim=True)
    positive = label > 0
    ones, zeros = positive.sum(-1), (label == 0).sum(-1)
    pairs = ones * zeros
    wins = (torch.where(positive, rank, 0).sum(-1) - ones * (ones + 1)).double() / 2
    area = (wins / pairs.clamp(min=1)).sum() / (pairs > 0).sum().clamp(min=1)
    return torch.where((pairs > 0).any(), area, 0.5)


MASKED_ACCURACY = Metric("accuracy", masked_accuracy)
METRICS: dict[str, Metric] = {"masked_accuracy": MASKED_ACCURACY} | {
    metric.name: metric
    for metric in (
        ACCURACY,
        Metric("top5_accuracy", in_top5, finish=ratio),
        Metric("binary_accuracy", binary_accuracy),
        Metric("token_accuracy", right_positions, finish=ratio),
        Metric("next_token_accuracy", _shifted(right_positions), finish=ratio),
        Metric("pixel_accuracy", right_positions, finish=ratio),
        Metric("f1", confusion, finish=partial(_macro, score=_f1)),
        Metric("f1_micro", confusion, finish=lambda c: _f1(*(n.sum(-1) for n in c.chunk(3, -1)))),
        Metric("dice", confusion, finish=partial(_macro, score=_f1)),
        Metric("iou", confusion, finish=partial(_macro, score=_iou)),
        Metric("auc", scores, finish=area_under_curve, pooled=True),
        Metric("perplexity", token_losses, False, perplexity),
        Metric("next_token_perplexity", _shifted(token_losses), False, perplexity),
        Metric("mse", objective.squared_error, False),
        Metric("rmse", _squares, False, lambda sums: ratio(sums).sqrt()),
        Metric("mae", objective.absolute_error, False),
    )
}
_USUAL = {
    "masked_cross_entropy": "masked_accuracy", "pixel_cross_entropy": "pixel_accuracy",
    "next_token_cross_entropy": "next_token_perplexity", "squared_error": "mse",
    "binary_cross_entropy": "binary_accuracy", "absolute_error": "mae", "huber": "mae",
    "cross_entropy": "accuracy", "crossentropy": "accuracy", "nll": "accuracy", "smoothl1": "mae",
    "multimargin": "accuracy", "bcewithlogits": "binary_accuracy",
}  # fmt: skip
"""Metric of a task that names none, by loss; a user's own have an accuracy."""


def loss_and_metric(loss: Any, metric: Any, targets: Tensor) -> tuple[LossFunction, Metric]:
    """Look up a loss and a metric that are given by name; None is the loss's usual metric."""
    for kind, given, known in (("loss", loss, LOSSES), ("metric", metric, METRICS)):
        check_names(kind, [given] if isinstance(given, str) else [], known)
    loss = LOSSES[loss] if isinstance(loss, str) else objective.of_torch(loss, targets)
    torch_own = isinstance(loss, objective.TorchLoss)
    if torch_own and loss.kind == "bce" and (metric is None or metric in METRICS):
        remedy = "remove the sigmoid and pass nn.BCEWithLogitsLoss(), or a Metric of your own"
        raise InputError(f"loss {loss.__name__} takes probabilities, metrics take logits: {remedy}")
    own = loss.__name__ if loss in LOSSES.values() else "cross_entropy"
    usual = _USUAL.get(loss.kind if torch_own else own)
    if metric is None:
        if usual is None:
            raise InputError(f"loss {loss.__name__} has no usual metric: pass metric=")
        metric = usual
        if torch_own and loss.axis and targets.ndim > 1:
            metric = "pixel_accuracy" if targets.ndim > 2 else "token_accuracy"
    errors = "mse", "rmse", "mae"
    numbers = targets.is_floating_point() and bool(((targets - 0.5).abs() != 0.5).any())
    if numbers and usual in errors and isinstance(metric, str) and metric not in errors:
        raise InputError(f"metric {metric!r} needs targets of 0 and 1: use mse, rmse or mae")
    if loss is objective.next_token_cross_entropy and metric in ("perplexity", "token_accuracy"):
        own = f"next_token_{metric.removeprefix('token_')}"
        raise InputError(f"metric {metric!r} does not look at the next token: use {own!r}")
    if isinstance(metric, str):
        metric = METRICS[metric]
        if torch_own and loss.axis and targets.ndim > 1:
            metric = replace(metric, function=partial(_of_positions, metric.function, loss.ignored))
    return loss, metric


def _of_positions(function: Any, ignored: int, outputs: Tensor, targets: Tensor) -> Tensor:
    """Call a function of ours on what torch's losses take: classes on axis 1, a label to ignore."""
    outputs = outputs.movedim(1, -1) if outputs.ndim == 3 else outputs
    return function(outputs, targets.masked_fill(targets == ignored, -1))  # type: ignore[no-any-return]
