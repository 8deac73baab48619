"""FedZMG's client step as a ``torch.optim.Optimizer``."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports nothing
from torch.optim import Optimizer

from fedzmg.errors import InputError, unknown
from fedzmg.kernels.precision import HAS_TRITON
from fedzmg.models.layout import Axes, Known, check_names, group_axes, known_axes
from fedzmg.optim import fused, updates

Params: TypeAlias = nn.Module | Iterable[Tensor | tuple[str, Tensor] | dict[str, Any]]
_KIND = attrgetter("device", "dtype")


class ZeroMeanSGD(Optimizer):
    """Stochastic gradient descent on zero-mean gradients, with momentum and decoupled decay.

    Per step, for every parameter::

        g <- g - mean(g over the layer's inputs)      weights only; vectors and scalars stay
        v <- momentum v + g                           v = 0 at first
        w <- w (1 - weight_decay lr) - lr v           nesterov: g + momentum v in place of v

    This is FedZMG's client rule. Make a new optimizer every round, or clear its ``state``, to start
    the round without momentum, as the algorithm does.

    The input axes depend on the layer. They are known from the model
    (``ZeroMeanSGD(model, ...)`` or :meth:`for_model`), from ``axes`` by name, or from
    ``"input_axes"`` of a parameter group: one tuple for all its weights, or a list with a tuple for
    each parameter. For a bare list of parameters all axes but the first are taken for inputs, with
    one warning: embeddings and transposed convolutions are centred over the wrong axes then.

    Args:
        params_or_model: a module, parameters, named parameters, or parameter groups.
        lr: learning rate; a tensor can change inside a compiled step or a CUDA graph.
        momentum: accumulating, in ``[0, 1)``; 0 keeps no state.
        weight_decay: decoupled, times ``lr`` per step; it never enters the momentum.
        axes: input axes by parameter name; with a model, only for modules of unknown types.
        nesterov: step along ``g + momentum v``.
        maximize: ascend instead of descend.
        foreach: False takes one tensor at a time; otherwise the fastest way is chosen.
        fused: require a kernel for the whole step: one Triton launch for all tensors on CUDA,
            torch's own on CPUs.
        capturable: never read a tensor ``lr`` from the device, for CUDA graphs.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> before = layer.weight.sum().item()
    >>> optimizer = ZeroMeanSGD(layer, lr=0.1, weight_decay=0.0)
    >>> layer(torch.tensor([[3.0, 5.0]])).sum().backward()
    >>> optimizer.step()
    >>> abs(layer.weight.sum().item() - before) < 1e-6
    True
    """

    def __init__(
        self, params_or_model: Params, lr: float | Tensor, momentum: float = 0.9,
        weight_decay: float = 5e-4, *, axes: Mapping[str, Axes] | None = None,
        nesterov: bool = False, maximize: bool = False, foreach: bool | None = None,
        fused: bool | None = None, capturable: bool = False,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "foreach": foreach, "fused": fused, "capturable": capturable,
            "dampening": 0,  # read by torch's SGD when it loads our state
        }  # fmt: skip
        self._known: Known | None = axes
        params: Any = params_or_model
        if isinstance(params_or_model, type):
            name = params_or_model.__name__
            raise InputError(f"the model is the class {name}: pass {name}(...)")
        if axes is not None and not isinstance(axes, Mapping):
            raise InputError(f"axes = {axes!r}: expected input axes by name of parameter")
        if isinstance(params_or_model, nn.Module):
            self._known = known_axes(params_or_model, axes)[0]
            params = _trainable(params_or_model)
        super().__init__(params, defaults)
        check_names(self._known, self.param_groups)

    @classmethod
    def for_model(
        cls, model: nn.Module, lr: float | Tensor, momentum: float = 0.9,
        weight_decay: float = 5e-4, *, axes: Mapping[str, Axes] | None = None,
        decay_scope: Literal["all", "kernels"] = "all", **options: Any,
    ) -> Self:  # fmt: skip
        """Make an optimizer of all trainable parameters of a model, with the options of the class.

        The model may be wrapped by DDP, or sharded by FSDP2 before. ``axes`` are for parameters of
        your own modules, and for those whose axes you want otherwise, such as
        ``{"embedding.weight": ()}``. ``decay_scope = "kernels"`` spares biases and norms.
        """
        if decay_scope not in ("all", "kernels"):
            raise unknown("decay_scope", str(decay_scope), ["all", "kernels"])
        named, (known, spared) = _trainable(model), known_axes(model, axes)
        groups: list[dict[str, Any]] = [{"params": named}]
        if decay_scope == "kernels":
            groups = [
                {"params": [(n, p) for n, p in named if p not in spared]},
                {"params": [(n, p) for n, p in named if p in spared], "weight_decay": 0.0},
            ]
        groups = [group for group in groups if group["params"]]
        return cls(groups, lr, momentum, weight_decay, axes=known, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; see the class for ``"input_axes"``."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
            group["input_axes"] = group_axes(group, self._known)
        except Exception:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": self._known}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tell a GradScaler to pass its scale and found_inf, and to leave gradients alone."""
        return any(group["fused"] for group in self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options, also of torch's SGD without dampening; same axes only."""
        groups, entries = [], {key for each in state_dict["state"].values() for key in each}
        for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if entries - {"momentum_buffer"} or "momentum" not in saved:
                raise InputError("the state belongs to another optimizer than SGD")
            group = {**self.defaults, "input_axes": own["input_axes"], **saved}
            _check(group)
            there, here = group["input_axes"], own["input_axes"]
            if [tuple(axes) for axes in there] != here:
                both = f"the state was saved with input axes {there}, here they are {here}"
                raise InputError(f"{both}: make both optimizers alike")
            groups.append({**group, "input_axes": here})
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor],
        velocities: list[Tensor],
    ) -> bool:  # fmt: skip
        """Fill the lists with all that has a gradient; True if nothing is sparse or sharded."""
        # On a fast device this loop is most of a step's time: it does little per tensor.
        state, moving, plain = self.state, bool(group["momentum"]), True
        strided, parameter = torch.strided, nn.Parameter
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            params.append(p)
            grads.append(grad)
            if moving:
                own = state[p]
                velocity = own.get("momentum_buffer")
                if velocity is None:
                    velocity = own["momentum_buffer"] = torch.zeros_like(p)
                velocities.append(velocity)
            if grad.layout is not strided or type(p) is not parameter:
                plain = False
        return plain

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` evaluates the model again and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            velocities: list[Tensor] = []
            plain = self._init_group(group, params, grads, velocities)
            if not params:
                continue
            axes = group["input_axes"]
            if len(params) < len(axes):
                pairs = zip(group["params"], axes, strict=True)
                axes = [each for p, each in pairs if p.grad is not None]
            if not plain:
                grads = list(map(updates.usable, grads, params, axes))
            sharded = not plain and any(map(updates.is_sharded, params))
            weights = updates.Weights(params, grads, velocities, axes, sharded)
            if not torch.compiler.is_compiling():
                self._eager(number, group, weights)
            # found_inf of a scaler depends on the data and cannot be part of a graph.
            elif getattr(self, "found_inf", None) is None:
                updates.one_by_one(weights, _with_lr(group, group["lr"]))
            else:
                self._step_outside_graph(number, group, weights)
        return loss

    def _eager(self, number: int, group: dict[str, Any], weights: updates.Weights) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        single = group["foreach"] is False and not group["fused"]
        kinds = list(map(_KIND, weights.params))
        for device, dtype in (unique := dict.fromkeys(kinds)):
            kind, lr, some = (device, dtype), group["lr"], weights
            if len(unique) > 1:
                some = weights.some([i for i, each in enumerate(kinds) if each == kind])
            on_device = isinstance(lr, Tensor) and lr.device == device
            if not single and fused.possible(device, dtype):
                launchers = self.__dict__.setdefault("_launchers", defaultdict(fused.Launcher))
                options = _with_lr(group, lr if on_device else float(lr))
                some = some.some(launchers[number, kind](some, options, scale, found_inf))
            elif group["fused"] and device.type not in ("cpu", "cuda" if HAS_TRITON else "cpu"):
                lacking = f"no kernel for {device.type} (CUDA needs triton)"
                raise InputError(f"fused=True: {lacking}; leave it out")
            if not some.params or (found_inf is not None and bool(found_inf)):
                continue
            if scale is not None:
                factor = 1 / scale
                some = some._replace(grads=[g * factor.to(g.device, g.dtype) for g in some.grads])
            # A tensor is read, unless that would wait for the device.
            options = _with_lr(group, lr if on_device and group["capturable"] else float(lr))
            if single:
                updates.one_by_one(some, options)
            elif not updates.fused_on_cpu(some, options):
                updates.foreach(some, options)

    _step_outside_graph = _disable_dynamo(_eager)


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _with_lr(group: Mapping[str, Any], lr: float | Tensor) -> dict[str, Any]:
    return {**group, "lr": lr.reshape(()) if isinstance(lr, Tensor) else lr}


def _check(group: Mapping[str, Any]) -> None:
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise InputError(f"lr has {group['lr'].numel()} entries: expected one number")
    for name, end in (("lr", "inf"), ("momentum", 1), ("weight_decay", "inf")):
        try:
            valid = 0 <= float(group[name]) < float(end)
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise InputError(f"{name} = {group[name]}: expected a number >= 0 and < {end}")
    if group["dampening"]:
        raise InputError(f"dampening = {group['dampening']}: expected 0")
    if group["nesterov"] and not group["momentum"]:
        raise InputError("nesterov=True needs a momentum: set it above 0")
    if group["foreach"] and group["fused"]:
        raise InputError("foreach=True and fused=True exclude each other: choose one")
