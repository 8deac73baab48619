"""The objective of a client: a model and a loss, as functions of one batch; common losses."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.kernels.layers import mapped
from fedzmg.models.copies import module_to
from fedzmg.models.functional import FunctionalModel, Maybe, Moved
from fedzmg.tree import Inputs, Tree

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # to one loss per example
Outputs: TypeAlias = tuple[Tensor, Any]  # and features, if wanted
PrepareFunction: TypeAlias = Callable[[Inputs, torch.dtype], Inputs]  # stored to model inputs


class Batch(NamedTuple):
    """One local step's examples; weights sum to one over the real ones."""

    x: Inputs
    y: Tensor
    weights: Tensor
    key: Maybe
    real: Maybe = ()  # flags of examples that are not padding, if the model needs them


@dataclass(frozen=True)
class Objective:
    """Model and per-example loss."""

    model: FunctionalModel
    loss: LossFunction
    layers_in: torch.dtype | None = None  # of layers on a GPU; parameters and losses keep theirs

    def to(self, device: torch.device, dtype: torch.dtype) -> "Objective":
        """Copy to a device; a loss that is a module may have weights."""
        loss = self.loss
        loss = module_to(loss, device, dtype) if isinstance(loss, nn.Module) else loss
        return replace(self, model=self.model.to(device, dtype), loss=loss)

    def train(
        self, params: Tree, batch: Batch, own: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tree]:
        """Compute the weighted loss of a batch, dropout on, and running statistics after it.

        Statistics of ``own`` are changed in place, others are copied.
        """
        moved = {} if own is None else dict(own)
        outputs, _ = self.without_features(params, batch, moved)
        return self._weighted(outputs, batch), Tree(moved)

    def eval_loss(self, params: Tree, batch: Batch) -> Tensor:
        """Compute the weighted loss of a batch, dropout off."""
        return self._weighted(self.outputs(params, batch.x, batch.real), batch)

    def outputs(self, params: Tree, x: Inputs, real: Maybe = ()) -> Tensor:
        """Compute predictions, dropout off."""
        return self._outputs(self.model.evaluate, params, x, real)

    def without_features(self, params: Tree, batch: Batch, moved: Moved = None) -> Outputs:
        """Compute outputs, and nothing in place of features; in training if ``moved`` is given."""
        if moved is None:
            return self.outputs(params, batch.x, batch.real), ()
        return self._outputs(self.model.train, params, batch.x, batch.key, batch.real, moved), ()

    def with_features(self, params: Tree, batch: Batch, moved: Moved = None) -> Outputs:
        """Compute outputs and inputs of the last layer; in training if ``moved`` is given."""
        key = () if moved is None else batch.key
        inputs = self._outputs(self.model.features, params, batch.x, key, batch.real, moved)
        return self._outputs(self.model.head, params, inputs), inputs

    def _outputs(self, model: Callable[..., Tensor], *inputs: object) -> Tensor:
        if self.layers_in is None:
            return model(*inputs)
        with torch.autocast("cuda", dtype=self.layers_in):
            return model(*inputs).float()

    def _weighted(self, outputs: Tensor, batch: Batch) -> Tensor:
        losses, weights = self.loss(outputs, batch.y), batch.weights
        # Eager on a CPU, every operation counts: a dot product is one instead of two.
        dots = losses.is_cpu and losses.dtype == weights.dtype and not mapped()
        return losses.dot(weights) if dots else (losses * weights).sum()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute cross-entropy per example, averaged over the positions of a sequence."""
    if mapped():  # where torch's own needs more operations
        losses = outputs.logsumexp(-1) - outputs.gather(-1, targets[..., None]).squeeze(-1)
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
    options: Any = {"reduction": "none", "ignore_index": -(1 << 60)}  # ignore none
    if targets.ndim == 1 and outputs.ndim == 2:
        return F.cross_entropy(outputs, targets, **options)
    wanted = targets.expand(outputs.shape[:-1]).flatten()
    losses = F.cross_entropy(outputs.flatten(0, -2), wanted, **options)
    return losses.reshape(len(targets), -1).mean(1)


def masked_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute cross-entropy per sequence, averaged over positions with a target >= 0."""
    valid = targets >= 0
    wanted = outputs.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    losses = torch.where(valid, outputs.logsumexp(-1) - wanted, 0.0)
    return losses.flatten(1).sum(1) / valid.flatten(1).sum(1).clamp(min=1)


def next_token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute cross-entropy of each next token; targets are the input ids, negative if padding."""
    return masked_cross_entropy(outputs[:, :-1], targets[:, 1:])


def pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute cross-entropy per image; axis 1 of outputs is the class, targets < 0 are ignored."""
    return masked_cross_entropy(outputs.movedim(1, -1), targets)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute cross-entropy of logits per example; targets are from 0 to 1, or ignored below 0."""
    targets = targets.reshape(outputs.shape).to(outputs.dtype)
    losses = outputs.clamp(min=0) - outputs * targets + (-outputs.abs()).exp().log1p()
    return mean_of_each(torch.where(targets >= 0, losses, 0.0), targets >= 0)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute squared error, averaged over an example's values."""
    return mean_of_each((outputs.reshape(targets.shape) - targets) ** 2)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute absolute error, averaged over an example's values."""
    return mean_of_each((outputs.reshape(targets.shape) - targets).abs())


def mean_of_each(values: Tensor, valid: Tensor | None = None) -> Tensor:
    """Average the values of each example, or the valid ones."""
    values = values.reshape(len(values), -1)
    if valid is None:
        return values.mean(1)
    return values.sum(1) / valid.reshape(len(valid), -1).sum(1).clamp(min=1)


LOSSES: dict[str, LossFunction] = {
    loss.__name__: loss
    for loss in (
        cross_entropy, masked_cross_entropy, next_token_cross_entropy, pixel_cross_entropy,
        binary_cross_entropy, squared_error, absolute_error,
    )
}  # fmt: skip


class TorchLoss(nn.Module):
    """A loss of torch as one value per example: the mean over the example's values."""

    def __init__(self, loss: Any, name: str, kind: str, options: Any, targets: Tensor) -> None:
        super().__init__()
        self.__name__, self.__qualname__ = name, f"{name} {options}"
        self.kind, self.options = kind, options
        self.each: Any = partial(loss, reduction="none")
        if isinstance(loss, nn.Module):
            self.each = copy.deepcopy(loss)
            self.each.reduction = "none"
        shares = targets.is_floating_point() and targets.ndim > 1
        self.axis = 1 if kind in _CLASSES and not shares else None
        self.ignored: int = options.get("ignore_index", -100)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each example; ignored labels do not count."""
        if self.kind not in (*_CLASSES, "multilabelmargin"):
            targets = targets.reshape(outputs.shape).to(outputs.dtype)
        values = self.each(outputs, targets)
        values = values.flatten(1).sum(1) if self.options["reduction"] == "batchmean" else values
        return mean_of_each(values, None if self.axis is None else targets != self.ignored)


_CLASSES = ("crossentropy", "nll", "multimargin")
_OWN: dict[str, LossFunction] = {
    "crossentropy": cross_entropy, "mse": squared_error, "l1": absolute_error,
    "bcewithlogits": binary_cross_entropy,
}  # fmt: skip


def of_torch(loss: Any, targets: Tensor) -> Any:
    """Convert a loss of torch to one value per example; return any other as it is."""
    maker = type(loss) if isinstance(loss, nn.Module) else getattr(loss, "func", loss)
    place = "" if isinstance(loss, type) else getattr(maker, "__module__", "")
    if place not in ("torch.nn.modules.loss", "torch.nn.functional"):
        return loss
    usual = {name: p.default for name, p in inspect.signature(maker).parameters.items()}
    given = loss.keywords if isinstance(loss, partial) else {}
    options = {name: given.get(name, getattr(loss, name, own)) for name, own in usual.items()}
    reduction = options.get("reduction")
    others = (n for n in options if n != "reduction")
    changed = [n for n in others if isinstance(options[n], Tensor) or options[n] != usual[n]]
    kind = maker.__name__.lower().replace("_", "").removesuffix("loss")
    kind = kind.replace("binarycrossentropy", "bce")
    weighted = "weight" in changed and kind in ("crossentropy", "nll")
    if reduction == "sum" or (weighted and reduction == "mean"):
        reason = f"reduction={reduction!r} {'and weight ' * weighted}depends on the batch"
        raise InputError(f"loss {maker.__name__} with {reason}: pass reduction='none'")
    if kind in _OWN and not changed and (kind != "crossentropy" or targets.ndim == 1):
        return _OWN[kind]
    return TorchLoss(loss, maker.__name__, kind, options, targets) if reduction else loss


def class_axis(loss: LossFunction) -> int | None:
    """Return the axis of classes in the outputs; None unless targets are labels of classes."""
    if isinstance(loss, TorchLoss):
        return loss.axis
    if any(loss is one for one in (cross_entropy, masked_cross_entropy, next_token_cross_entropy)):
        return -1
    return 1 if loss is pixel_cross_entropy else None
