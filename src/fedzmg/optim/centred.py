"""Gradients centred in place, and any torch optimizer with its final step centred."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedzmg.errors import InputError
from fedzmg.models import layout
from fedzmg.optim.updates import inputs, local, sum_of_inputs, usable


@torch.no_grad()
def zero_mean_(model: nn.Module, axes: Mapping[str, layout.Axes] | None = None) -> None:
    """Centre the gradients of a model in place: call it between ``backward`` and any ``step``.

    With clipping, clip first and centre afterwards if the step must be zero-mean; with a scaler,
    unscale first only if something else needs it: centring commutes with a factor. Parameters
    without a gradient are skipped. ``axes`` are input axes by name, for parameters of your own.

    >>> layer = nn.Linear(2, 1)
    >>> layer(torch.tensor([[3.0, 5.0]])).sum().backward()
    >>> zero_mean_(layer)
    >>> layer.weight.grad
    tensor([[-1.,  1.]])
    """
    known = layout.known_axes(model, axes)[0]
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    layout.warn_of_single_inputs((names[p], p, over) for p, over in known.items())
    for p, over in known.items():
        grad = p.grad
        if over and grad is not None and grad.numel():
            total = sum_of_inputs(usable(grad, grad, over), over)
            local(grad).sub_(total, alpha=1 / inputs(grad.shape, over))


class Centred(Optimizer):
    """A torch optimizer whose step is centred, for optimizers that scale every entry separately.

    Adam and similar optimizers turn a zero-mean gradient into a step that is not zero-mean, so
    centring their gradients does not keep the mean of the weights. Centring their step does::

        w' <- optimizer(w, g)
        w  <- w' - mean(w' - w over the layer's inputs)

    Only the sums before and after are kept, not a copy of the model. All of the step is centred,
    decoupled weight decay included: the sum of every column never changes.

    It shares ``param_groups`` and ``state`` with the optimizer inside, so schedulers, checkpoints
    and scalers see one optimizer. Use the wrapper for all calls.

    Args:
        optimizer: any torch optimizer.
        model: the module whose layers determine the input axes; None if groups of the optimizer
            have ``"input_axes"``, or if its parameters have names and ``axes`` lists them.
        axes: input axes by parameter name.

    >>> layer = nn.Linear(3, 1)
    >>> optimizer = Centred(torch.optim.AdamW(layer.parameters(), lr=0.1), layer)
    >>> before = layer.weight.sum().item()
    >>> layer(torch.tensor([[1.0, 2.0, -4.0]])).sum().backward()
    >>> optimizer.step()
    >>> abs(layer.weight.sum().item() - before) < 1e-6
    True
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module | None = None,
        axes: Mapping[str, layout.Axes] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise InputError(f"optimizer is a {kind}: expected a torch.optim.Optimizer")
        self.optimizer = optimizer
        self._known: layout.Known | None = axes
        if model is not None:
            self._known = layout.known_axes(model, axes)[0]
        layout.check_names(self._known, optimizer.param_groups)
        chosen = [layout.group_axes(group, self._known) for group in optimizer.param_groups]
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share(chosen)

    def _share(self, axes: list[list[layout.Axes]]) -> None:
        for group, each in zip(self.optimizer.param_groups, axes, strict=True):
            group["input_axes"] = each
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        self.defaults = self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer inside, with ``"input_axes"`` if none of the model's."""
        if any(param_group is group for group in self.optimizer.param_groups):
            return  # called by the constructor
        self.optimizer.add_param_group(param_group)
        group = self.optimizer.param_groups[-1]
        try:
            group["input_axes"] = layout.group_axes(group, self._known)
        except Exception:
            self.optimizer.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the optimizer inside and centre it.

        Steps of an optimizer that evaluates its closure several times (LBFGS) are centred together.
        """
        centred = [
            (p, axes)
            for group in self.param_groups
            for p, axes in zip(group["params"], group["input_axes"], strict=True)
            if axes and p.numel() and (p.grad is not None or closure is not None)
        ]
        with torch.no_grad():
            before = [sum_of_inputs(p, axes) for p, axes in centred]
        loss = self.optimizer.step(closure)
        with torch.no_grad():
            for (p, axes), old in zip(centred, before, strict=True):
                moved = sum_of_inputs(p, axes).sub_(old)
                local(p).sub_(moved, alpha=1 / inputs(p.shape, axes))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this or of the bare optimizer; the input axes do not change."""
        own = [group["input_axes"] for group in self.param_groups]
        self.optimizer.load_state_dict(state_dict)
        self._share(own)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "_known": self._known, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share([group["input_axes"] for group in self.optimizer.param_groups])
