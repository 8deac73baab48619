"""Check before the first round that the parts of a task fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedzmg.data.federated import Examples
from fedzmg.errors import InputError
from fedzmg.evaluation import Metric
from fedzmg.models.initial import check_scheme
from fedzmg.models.objective import cross_entropy, masked_cross_entropy

if TYPE_CHECKING:
    from fedzmg.tasks.task import Task


def check(task: Task) -> None:
    """Reject a task whose parts do not fit."""
    _check_kinds(task)
    if task.protocol.cohort > len(task.train) and not task.protocol.replacement:
        raise InputError(
            f"cohort = {task.protocol.cohort} but there are {len(task.train)} clients: "
            "choose a smaller cohort or replacement=True"
        )
    task.metric.check_level("threshold", task.protocol.threshold)
    params = task.model.params()
    dtype = next(iter(params.values())).dtype
    parts = {"training data": task.train.examples, "test data": task.test}
    if task.tune is not None:
        parts["tuning data"] = task.tune
    for what, data in parts.items():
        # A copy: a prepare function may work in place.
        x, y = Examples(data.x[:2].clone(), data.y[:2]).to(data.x.device, dtype)
        try:
            with torch.no_grad():
                outputs = task.model.try_out(params, task.prepare(x, dtype))
        except InputError:
            raise
        except Exception as error:  # a user's own module can raise anything
            raise InputError(
                f"the model cannot read {what} of shape {tuple(x.shape)[1:]} and type "
                f"{str(x.dtype).removeprefix('torch.')}: {_reason(error)}"
            ) from error
        if task.loss is cross_entropy:
            _check_labels(data.y, outputs, what)
        elif task.loss is masked_cross_entropy:
            _check_labels(data.y.clamp(min=0), outputs, what)
        _check_per_example("loss", task.loss, outputs, y)
        _check_per_example(f"metric {task.metric.name}", task.metric.function, outputs, y)


def _check_kinds(task: Task) -> None:
    """Reject wrong types of name, metric and functions."""
    for what, good, expected in (
        ("name", isinstance(task.name, str) and task.name, "text"),
        ("metric", isinstance(task.metric, Metric), "fedzmg.Metric(NAME, FUNCTION)"),
        ("loss", _is_function(task.loss), "a function (outputs, targets) -> one loss per example"),
        ("prepare", _is_function(task.prepare), "a function (stored inputs, dtype) -> inputs"),
    ):
        if not good:
            value = getattr(task, what)
            found = f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
            raise InputError(f"{what}: expected {expected}, not {found}")
    check_scheme(task.init)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _reason(error: Exception) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__} {next(iter(str(error).splitlines()), '')}".rstrip()


def _check_labels(y: Tensor, logits: Any, what: str) -> None:
    """Reject labels that the outputs cannot predict."""
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the model gives a {type(logits).__name__} for {what}: return one tensor, or pass "
            "your own loss and metric"
        )
    outputs = logits.shape[-1]
    if y.is_floating_point():
        raise InputError(f"{what} has {y.dtype} labels: class labels must be whole numbers")
    if y.ndim != logits.ndim - 1:
        raise InputError(
            f"{what} has labels of shape {tuple(y.shape)} for outputs of shape "
            f"{tuple(logits.shape)}: give one whole number per prediction"
        )
    for label in (int(y.min()), int(y.max())):
        if not 0 <= label < outputs:
            raise InputError(
                f"{what} holds the label {label} but the model has {outputs} outputs "
                f"(labels 0 to {outputs - 1}): change the labels or the last layer"
            )


def _check_per_example(what: str, function: Any, outputs: Tensor, y: Tensor) -> None:
    try:
        values = function(outputs, y)
    except Exception as error:  # a user's own function can raise anything
        message = f"the {what} fails on the model's outputs: {_reason(error)}"
        raise InputError(message) from error
    if not isinstance(values, Tensor) or values.shape != (len(y),):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"the {what} gave {shape} for {len(y)} examples: return one value per example "
            "(for a torch loss: reduction='none')"
        )
