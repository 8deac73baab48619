"""Batch normalisation over clients: masked batch statistics, and running ones in the model's tree.

Running statistics are parameters that are not trained. A training pass receives copies of them,
which layers change in place as torch's do, and the engine takes the copies over after the step. An
engine that pads batches passes flags of the real examples; padding never enters a statistic. A
batch with one value per channel, which torch refuses, becomes zero and changes no statistic.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedzmg.errors import InputError, check_names
from fedzmg.kernels import norm as fused
from fedzmg.parts import BATCH_NORM
from fedzmg.rule import Layout, ParamInfo, Role

BatchNormPolicy = Literal["average", "local", "frozen", "batch"]
"""``average``: running statistics travel and are averaged. ``local``: statistics and parameters of
the layers stay with the client. ``frozen``: statistics are constants, in training, too. ``batch``:
the statistics of the batch, in evaluation, too."""


class _Masked(_BatchNorm):
    """Batch normalisation whose statistics leave out padding."""

    real: Tensor  # flags of the examples that are not padding; empty: there is no padding

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training and self.running_mean is not None:
            assert self.running_var is not None
            return self._scaled(input, self.running_mean, self.running_var).to(input.dtype)
        if not len(self.real) and input.numel() > input.shape[1]:
            return _BatchNorm.forward(self, input)
        real = self.real if len(self.real) else input.new_ones(len(input), dtype=torch.bool)
        own = [self.weight, self.bias, self.running_mean, self.running_var]
        known = [part for part in own if part is not None]
        if len(known) == len(own) and self.momentum is not None and fused.available(input):
            out: Tensor
            out, mean, var = fused.batch_norm(input, real, *known, self.momentum, self.eps)
            known[2].copy_(mean.detach())
            known[3].copy_(var.detach())
            return out
        return self._masked(input, real.reshape(-1, *[1] * (input.ndim - 1))).to(input.dtype)

    def _masked(self, x: Tensor, real: Tensor) -> Tensor:
        """Normalise by the statistics of the real examples; move the running ones."""
        x = torch.where(real, x.float() if x.dtype.itemsize < 4 else x, 0)
        axes, wide = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        count = (real.sum() * x[0, 0].numel()).to(x.dtype)
        # A client without examples in this step gets numbers that are finite and never used.
        total = count.clamp(min=1)
        mean = x.sum(axes) / total
        centred = x - mean.reshape(wide)
        var = torch.where(real, centred, 0).square().sum(axes) / total
        if self.running_mean is not None:
            self._move(mean.detach(), (var * total / (total - 1).clamp(min=1)).detach(), count > 1)
        return self._scaled(centred, None, var)

    def _scaled(self, x: Tensor, mean: Tensor | None, var: Tensor) -> Tensor:
        """Return a batch minus its mean, by its deviation, times weight plus bias."""
        wide = (-1, *[1] * (x.ndim - 2))
        scale = (var + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        shift = self.bias if mean is None else -mean * scale
        if mean is not None and self.bias is not None:
            shift = shift + self.bias
        out = x * scale.reshape(wide)
        return out if shift is None else out + shift.reshape(wide)

    def _move(self, mean: Tensor, var: Tensor, moves: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        share: float | Tensor | None = self.momentum
        if share is None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(moves.to(self.num_batches_tracked.dtype))
            share = 1 / self.num_batches_tracked.clamp(min=1)
        for old, new in ((self.running_mean, mean), (self.running_var, var)):
            old.copy_(torch.where(moves, (1 - share) * old + share * new, old))


_SWAPS: dict[type[nn.Module], type] = {  # by exact type: a user's subclass keeps its forward pass
    kind: type(kind.__name__, (_Masked, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
}
BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm = _SWAPS.values()


def norms_of(module: nn.Module) -> dict[str, _NormBase]:
    """Return layers that normalise by statistics of batches, or keep running statistics."""
    known = ((name, m) for name, m in module.named_modules() if isinstance(m, _NormBase))
    return {n: m for n, m in known if isinstance(m, _BatchNorm) or m.running_mean is not None}


def forget_statistics(module: nn.Module) -> None:
    """Let layers use the statistics of the batch also in evaluation."""
    for norm in norms_of(module).values():
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None


def with_statistics(module: nn.Module, layout: Layout, policy: BatchNormPolicy) -> Layout:
    """Return a layout with the running statistics, after the parameters of their layers."""
    check_names("batch_norm", [policy], get_args(BatchNormPolicy))
    norms = norms_of(module)
    if not norms:
        if policy != "average":
            raise InputError(f"batch_norm = {policy!r}: the model has no BatchNorm layer")
        return layout
    found: dict[str, ParamInfo] = {}
    for prefix, child in module.named_modules():
        norm, dot = norms.get(prefix), f"{prefix}." if prefix else ""
        for name in (f"{dot}{own}" for own in child._parameters):
            if name in layout:
                found[name] = layout[name] if norm is None else ParamInfo("norm", (), BATCH_NORM)
        if norm is not None and norm.running_mean is not None and policy in ("average", "local"):
            own: dict[str, Role] = dict.fromkeys(("running_mean", "running_var"), "statistics")
            if norm.momentum is None:  # the share of a batch depends on their number
                own["num_batches_tracked"] = "counts"
            found |= {f"{dot}{name}": ParamInfo(role, (), BATCH_NORM) for name, role in own.items()}
    return found


class NormLayers:
    """Normalisation layers of a copied module, prepared for a policy."""

    def __init__(self, module: nn.Module, policy: BatchNormPolicy) -> None:
        self._policy = policy
        self.constants: list[Tensor] = []  # statistics that stay as they are
        self.dependent = self.always_dependent = False  # on other examples: in training; always
        self.flags: list[str] = []  # buffers that take the flags of real examples
        self.unmapped = ""  # reason to train client by client: a layer cannot leave out padding
        norms = norms_of(module)
        if policy == "batch":
            forget_statistics(module)
        for prefix, norm in norms.items():
            if policy == "frozen":
                self.constants += norm.buffers()
            known = type(norm) in _SWAPS
            if known:
                norm.__class__ = _SWAPS[type(norm)]
                norm.register_buffer("real", torch.ones(0, dtype=torch.bool), persistent=False)
                self.flags.append(f"{prefix}.real".lstrip("."))
            if policy == "frozen" and norm.running_mean is not None:
                continue
            self.dependent = True
            self.always_dependent |= norm.running_mean is None
            if not known:
                kind = type(norm).__name__
                self.unmapped = f"layer {prefix or 'model'!r} ({kind}) cannot leave out padding"

    def set_mode(self, module: nn.Module, *, training: bool) -> nn.Module:
        """Switch a copy of the module to training or evaluation."""
        module.train(training)
        for norm in norms_of(module).values() if self._policy == "frozen" else ():
            norm.eval()
        return module
