"""FedZMG's client step as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports nothing
from torch.optim import Optimizer

from fedzmg.errors import InputError, unknown
from fedzmg.models.kernels.precision import HAS_TRITON
from fedzmg.optim import fused, updates
from fedzmg.optim.axes import Axes, Known, axes_of, check_names, model_layout
from fedzmg.optim.updates import Numbers, Weights, dense, is_sharded, sharded_like

Params: TypeAlias = (
    nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
)
Kind: TypeAlias = tuple[torch.device, torch.dtype]


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
        foreach: many tensors at a time; None chooses the fastest way.
        fused: the whole step in one pass where there is a kernel for it (one Triton launch for all
            tensors on CUDA, torch's own on CPUs), as with ``foreach`` elsewhere.
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
        self,
        params_or_model: Params,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        *,
        axes: Mapping[str, Axes] | None = None,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": 0,  # read by torch's SGD when it loads our state
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
        }
        self._known: Known | None = axes
        params: Any = params_or_model
        if isinstance(params_or_model, type):
            name = params_or_model.__name__
            raise InputError(f"the model is the class {name}: pass {name}(...)")
        if isinstance(params_or_model, nn.Module):
            self._known, axes = model_layout(params_or_model, axes)[0], None
            params = _trainable(params_or_model)
        super().__init__(params, defaults)
        if axes is not None:
            check_names(axes, self.param_groups)
        if fused:
            # A GradScaler then passes its scale and found_inf, and leaves gradients alone.
            self._step_supports_amp_scaling = True

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        *,
        axes: Mapping[str, Axes] | None = None,
        decay_scope: Literal["all", "kernels"] = "all",
        **options: Any,
    ) -> Self:
        """Make an optimizer of all trainable parameters of a model.

        Args:
            model: any module, also wrapped by DDP or sharded by FSDP2 (after sharding).
            lr: learning rate.
            momentum: as in the class.
            weight_decay: as in the class.
            axes: input axes of parameters of your own modules, by name; also for those whose axes
                you want otherwise, such as ``{"embedding.weight": ()}``.
            decay_scope: ``kernels`` spares biases and norms, in a group of their own.
            options: as in the class.
        """
        if decay_scope not in ("all", "kernels"):
            raise unknown("decay_scope", str(decay_scope), ["all", "kernels"])
        named, (known, spared) = _trainable(model), model_layout(model, axes)
        groups: list[dict[str, Any]] = [{"params": named}]
        if decay_scope == "kernels":
            groups = [
                {"params": [(n, p) for n, p in named if p not in spared]},
                {"params": [(n, p) for n, p in named if p in spared], "weight_decay": 0.0},
            ]
        for group in groups:
            group["input_axes"] = [known[p] for _, p in group["params"]]
        made = cls([g for g in groups if g["params"]], lr, momentum, weight_decay, **options)
        made._known = known
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; see the class for ``"input_axes"``."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
            group["input_axes"] = axes_of(group, self._known)
        except Exception:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": self._known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        if any(group["fused"] for group in self.param_groups):
            self._step_supports_amp_scaling = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options, also those of ``torch.optim.SGD`` without dampening.

        Input axes belong to the model: a state with other axes is rejected.
        """
        entries = {key for each in state_dict["state"].values() for key in each}
        foreign = sorted(entries - {"momentum_buffer"})
        if foreign or any("momentum" not in saved for saved in state_dict["param_groups"]):
            kind = f"has {', '.join(foreign)}" if foreign else "has no momentum"
            raise InputError(f"the state {kind}: it belongs to another optimizer than SGD")
        own_axes = [group["input_axes"] for group in self.param_groups]
        for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=False):
            _check({**own, **saved})
            pairs = zip(saved.get("input_axes", ()), own["input_axes"], strict=False)
            for i, (theirs, ours) in enumerate(pairs):
                if tuple(theirs) != ours:
                    raise InputError(
                        f"the state was saved with input axes {tuple(theirs)} of parameter {i}, "
                        f"here they are {ours}: make both optimizers alike"
                    )
        super().load_state_dict(state_dict)
        for group, axes in zip(self.param_groups, own_axes, strict=True):
            group["input_axes"] = axes

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        velocities: list[Tensor],
    ) -> bool:
        """Fill the lists with all that has a gradient; True if nothing is sparse or sharded.

        On a fast device this loop is most of a step's time: it does little per tensor.
        """
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
            sharded = False
            if not plain:
                grads = [dense(g, each) for g, each in zip(grads, axes, strict=True)]
                sharded = any(map(is_sharded, params))
            if sharded:
                grads = [sharded_like(g, p) for g, p in zip(grads, params, strict=True)]
            weights = Weights(params, grads, velocities, axes, sharded)
            if not torch.compiler.is_compiling():
                self._eager(number, group, weights)
            # found_inf of a scaler depends on the data and cannot be part of a graph.
            elif getattr(self, "found_inf", None) is None:
                updates.one_by_one(weights, _numbers(group, group["lr"]))
            else:
                self._step_outside_graph(number, group, weights)
        return loss

    @_disable_dynamo
    def _step_outside_graph(self, number: int, group: dict[str, Any], weights: Weights) -> None:
        self._eager(number, group, weights)

    def _eager(self, number: int, group: dict[str, Any], weights: Weights) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for (device, dtype), some in _by_kind(weights):
            numbers = _numbers(group, _readable(group, device))
            single = group["foreach"] is False and not group["fused"]
            needs_triton = device.type == "cuda" and not HAS_TRITON
            if not single and fused.possible(device, dtype):
                some = self._launched(
                    (number, device, dtype), group, some, numbers, scale, found_inf
                )
            elif group["fused"] and (device.type not in ("cpu", "cuda") or needs_triton):
                reason = "triton is not installed" if needs_triton else f"none for {device.type}"
                raise InputError(f"fused=True: there is no kernel ({reason}); leave it out")
            if not some.params or (found_inf is not None and bool(found_inf)):
                continue
            if scale is not None:
                factor = 1 / scale
                some = some._replace(grads=[g * factor.to(g.device, g.dtype) for g in some.grads])
            if single:
                updates.one_by_one(some, numbers)
            elif updates.can_use_fused_on_cpu(some, numbers):
                updates.fused_on_cpu(some, numbers)
            else:
                updates.foreach(some, numbers)

    def _launched(
        self,
        key: Any,
        group: dict[str, Any],
        weights: Weights,
        numbers: Numbers,
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> Weights:
        """Launch the kernel for all tensors that it can walk, and return the others."""
        step = group["foreach"] is not True
        if not step and (numbers.nesterov or not weights.velocities):
            return weights  # the kernel would write velocities alone
        lr, device = group["lr"], key[1]
        on_device = isinstance(lr, Tensor) and lr.device == device
        launchers = self.__dict__.setdefault("_launchers", {})
        if key not in launchers:
            launchers[key] = fused.Launcher()
        ours, others = launchers[key](
            weights, _numbers(group, lr) if on_device else numbers, step=step, scale=scale,
            found_inf=found_inf, capturable=group["capturable"],
        )  # fmt: skip
        if not step and ours:
            done = weights if not others else weights.some(ours)
            updates.finish(done.local(), [], numbers)
        return weights.some(others)


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _by_kind(weights: Weights) -> list[tuple[Kind, Weights]]:
    """Group tensors by device and type; usually there is one group."""
    devices = set(map(attrgetter("device"), weights.params))
    dtypes = set(map(attrgetter("dtype"), weights.params))
    if len(devices) == len(dtypes) == 1:
        return [((devices.pop(), dtypes.pop()), weights)]
    indices: dict[Kind, list[int]] = {}
    for i, p in enumerate(weights.params):
        indices.setdefault((p.device, p.dtype), []).append(i)
    return [(kind, weights.some(some)) for kind, some in indices.items()]


def _check(group: Mapping[str, Any]) -> None:
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise InputError(f"lr has {group['lr'].numel()} entries: expected one number")
    for name, end in (("lr", math.inf), ("momentum", 1), ("weight_decay", math.inf)):
        try:
            value = float(group[name])
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < end:
            raise InputError(f"{name} = {group[name]}: expected a number >= 0 and < {end}")
    if group["dampening"]:
        raise InputError(f"dampening = {group['dampening']}: expected 0")
    if group["nesterov"] and not group["momentum"]:
        raise InputError("nesterov=True needs a momentum: set it above 0")
    if group["foreach"] and group["fused"]:
        raise InputError("foreach=True and fused=True exclude each other: choose one")


def _readable(group: Mapping[str, Any], device: torch.device) -> float | Tensor:
    """Return the learning rate as a number, unless that would wait for the device."""
    lr = group["lr"]
    waits = isinstance(lr, Tensor) and group["capturable"] and lr.device == device
    return lr if waits else float(lr)


def _numbers(group: Mapping[str, Any], lr: float | Tensor) -> Numbers:
    return Numbers(
        lr=lr.reshape(()) if isinstance(lr, Tensor) else lr,
        momentum=group["momentum"],
        weight_decay=float(group["weight_decay"]),
        nesterov=group["nesterov"],
        sign=-1 if group["maximize"] else 1,
    )
