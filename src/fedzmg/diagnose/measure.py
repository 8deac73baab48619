"""What the zero-mean projection takes from clients' gradients, layer by layer.

Gradients arrive in parts of some clients and are added up, so that memory does not grow with the
number of clients. With ``g`` a client's gradient of one weight, ``d`` inputs per output unit and
``nu`` the means over the inputs, the mean component has the energy ``d |nu|^2``; the projection
removes exactly that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.algorithms.projection import Axes, projected_axes, zero_mean
from fedzmg.contract import Layout
from fedzmg.tree import Tree

Floats = npt.NDArray[np.float64]
Part = tuple[Tree, Floats]
"""Gradients of some clients, first axis clients, and the weight of each."""

WHOLE = "whole model"
ROUNDING = 1e-12
"""A part of an energy that is smaller than this is what rounding leaves of nothing."""


class Spread(NamedTuple):
    """Values of clients; None where no client has one."""

    mean: float | None
    sd: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Floats) -> Spread:
        """Describe one value per client; those that are not a number are left out.

        >>> Spread.of(np.array([0.25, 0.75, np.nan]))
        Spread(mean=0.5, sd=0.3535533905932738, low=0.25, high=0.75)
        """
        found = values[np.isfinite(values)]
        if not len(found):
            return cls(None, None, None, None)
        sd = float(found.std(ddof=1)) if len(found) > 1 else None
        return cls(float(found.mean()), sd, float(found.min()), float(found.max()))


class Pair(NamedTuple):
    """A quantity before and after the projection; None where it is not defined."""

    before: float | None
    after: float | None

    @property
    def kept(self) -> float | None:
        """After over before; None where there was nothing before."""
        if self.before is None or self.after is None or self.before <= 0.0:
            return None
        return self.after / self.before


@dataclass(frozen=True)
class Layer:
    """One weight that is projected, or the whole model with everything that is not."""

    name: str
    kind: str
    """Type of the layer, such as ``Conv2d``."""
    inputs: int
    """Entries that one mean runs over; 0 for the whole model."""
    parameters: int
    energy: float | None
    """Share of all clients' gradient energy that lies in this layer."""
    share: Spread
    """Of each client's gradient, the share of its energy that is its mean component."""
    forbidden: float | None
    """The same of the averaged gradient: what the projection takes from the loss gradient."""
    lost: float | None
    """The part of it that no bias can do instead; see :func:`measure`."""
    distance: Pair
    """Mean squared distance between the gradients of two clients."""
    diversity: Pair
    """``n sum |g_k|^2 / |sum g_k|^2``: 1 if all clients agree, n if they are orthogonal."""
    identity_error: float | None
    """Largest relative error of the paper's identity over pairs of neighbouring clients."""
    shares: tuple[float | None, ...]
    """One mean share per client."""


@dataclass(frozen=True)
class Measurement:
    """All layers of a model, and the model as a whole."""

    layers: tuple[Layer, ...]
    whole: Layer

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"layers": [_plain(one) for one in self.layers], "whole": _plain(self.whole)}


def _plain(layer: Layer) -> dict[str, Any]:
    pairs = {name: getattr(layer, name)._asdict() for name in ("distance", "diversity")}
    return {**asdict(layer), **pairs, "share": layer.share._asdict(), "shares": list(layer.shares)}


def measure(parts: Iterable[Part], layout: Layout) -> Measurement:
    """Measure clients' gradients.

    The mean component of the averaged gradient is forbidden for good: the projection keeps the sum
    of a unit's weights where it is. Part of that a bias can do instead. Moving all weights of a
    unit by ``c`` moves its output by ``c d m(x)``, with ``m(x)`` the mean of its inputs; where
    ``m(x)`` is the same for all examples that is what its bias does. So ``nu = m beta + rest`` with
    ``beta`` the gradient of the bias and one ``m`` per layer, by least squares over units and
    clients. The rest is what is lost. An embedding's inputs are one-hot, ``m(x)`` is constant, and
    its mean is a shift that the layer after it undoes, so nothing of it counts as lost. A layer
    with one input per unit is nothing but its mean and stays where it starts: all of it is lost.

    Args:
        parts: gradients, see :data:`Part`; weights need not sum to one.
        layout: roles and input axes of the parameters; layers are measured in its order.
    """
    sums = _Sums(layout)
    for gradients, weights in parts:
        sums.add(gradients, weights)
    return sums.measurement()


def _bias_of(layout: Layout) -> dict[str, str]:
    """The bias that is added to what a weight gives, where there is one."""
    found = {}
    for name in layout:
        owner, dot, own = name.rpartition(".")
        bias = owner + dot + own.replace("weight", "bias")
        if bias != name and bias in layout and layout[bias].role == "bias":
            found[name] = bias
    return found


class _Sums:
    """Sums over clients, in double precision."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._bias_of = layout, _bias_of(layout)
        axes = {name: over for name, over in projected_axes(layout).items() if over}
        self._axes: Axes = axes
        self._sum: dict[str, Tensor] = {}
        self._weighted: dict[str, Tensor] = {}
        self._weight = 0.0
        self._energy: dict[str, list[Tensor]] = {}
        self._mean_energy: dict[str, list[Tensor]] = {name: [] for name in axes}
        self._fit = {name: torch.zeros(2, dtype=torch.float64) for name in axes}
        self._error: dict[str, float] = {}
        self._last: dict[str, Tensor] = {}

    def add(self, gradients: Tree, weights: Floats) -> None:
        """Add some clients."""
        share = torch.from_numpy(np.asarray(weights, dtype=np.float64))
        self._weight += float(share.sum())
        biases = {name: gradients[bias] for name, bias in self._bias_of.items()}
        for name, given in gradients.items():
            wide = given.detach().to("cpu", torch.float64)
            flat = wide.flatten(1)
            weighted = (share @ flat).reshape(wide.shape[1:])
            self._sum[name] = self._sum.get(name, 0.0) + wide.sum(0)
            self._weighted[name] = self._weighted.get(name, 0.0) + weighted
            self._energy.setdefault(name, []).append(flat.square().sum(1))
            if name in self._axes:
                means = _means(wide, self._axes[name])
                energy = _inputs(wide[0], self._axes[name]) * means.square().sum(1)
                self._mean_energy[name].append(energy)
                self._check_identity(name, wide)
                if name in biases:
                    beta = biases[name].detach().to("cpu", torch.float64).flatten(1)
                    if beta.shape == means.shape:
                        self._fit[name] += torch.stack([(means * beta).sum(), beta.square().sum()])

    def _check_identity(self, name: str, gradients: Tensor) -> None:
        """``|Pg_i - Pg_j|^2 = |g_i - g_j|^2 - d (nu_i - nu_j)^2`` for neighbours."""
        axes = self._axes[name]
        for one in gradients:
            if name in self._last:
                other = self._last[name]
                after = (zero_mean(one, axes) - zero_mean(other, axes)).square().sum()
                before = (one - other).square().sum()
                gap = (one.mean(axes) - other.mean(axes)).square().sum()
                said = before - _inputs(one, axes) * gap
                if before > 0:
                    error = float((after - said).abs() / before)
                    self._error[name] = max(error, self._error.get(name, 0.0))
            self._last[name] = one

    def measurement(self) -> Measurement:
        """What has been added so far."""
        energies = {name: torch.cat(parts).numpy() for name, parts in self._energy.items()}
        clients = len(next(iter(energies.values())))
        every = np.sum(list(energies.values()), axis=0)
        layers = []
        total = dict.fromkeys(("sum", "sum_mean", "loss", "loss_mean", "lost"), 0.0)
        removed = np.zeros(clients)
        # In the order of the layout: gradients have that of whatever the model was read from.
        for name in self._layout:
            energy = energies[name]
            numbers = self._numbers(name)
            total = {key: value + numbers[key] for key, value in total.items()}
            if name not in self._axes:
                continue
            mean = torch.cat(self._mean_energy[name]).numpy()
            removed += mean
            layers.append(
                _layer(
                    name, self._layout[name].layer, energy, mean, every, numbers,
                    inputs=_inputs(self._sum[name], self._axes[name]),
                    parameters=self._sum[name].numel(), error=self._error.get(name),
                )
            )  # fmt: skip
        whole = _layer(
            WHOLE, "", every, removed, every, total, inputs=0,
            parameters=sum(leaf.numel() for leaf in self._sum.values()),
            error=max(self._error.values(), default=None),
        )  # fmt: skip
        return Measurement(tuple(layers), whole)

    def _numbers(self, name: str) -> dict[str, float]:
        """Energies of one parameter's summed and of its averaged gradient, whole and mean."""
        whole, loss = self._sum[name], self._weighted[name] / self._weight
        found = {
            "sum": float(whole.square().sum()), "sum_mean": 0.0,
            "loss": float(loss.square().sum()), "loss_mean": 0.0, "lost": 0.0,
        }  # fmt: skip
        if name not in self._axes:
            return found
        axes = self._axes[name]
        inputs, means = _inputs(whole, axes), _means(loss[None], axes)[0]
        found["sum_mean"] = inputs * float(_means(whole[None], axes).square().sum())
        found["loss_mean"] = inputs * float(means.square().sum())
        if self._layout[name].layer == "Embedding":
            return found
        found["lost"] = found["loss_mean"]
        fit = self._fit[name]
        if name in self._bias_of and fit[1] > 0 and inputs > 1:
            beta = (self._weighted[self._bias_of[name]] / self._weight).flatten()
            rest = inputs * float((means - fit[0] / fit[1] * beta).square().sum())
            # Nobody has to use the bias, so it cannot make things worse.
            found["lost"] = min(found["lost"], rest)
        return found


def _layer(
    name: str,
    kind: str,
    energy: Floats,
    mean: Floats,
    every: Floats,
    numbers: Mapping[str, float],
    *,
    inputs: int,
    parameters: int,
    error: float | None,
) -> Layer:
    clients = len(energy)
    shares = np.divide(mean, energy, out=np.full(clients, np.nan), where=energy > 0)
    left, sum_left = _left(energy, mean), float(_left(numbers["sum"], numbers["sum_mean"]))
    return Layer(
        name=name,
        kind=kind,
        inputs=inputs,
        parameters=parameters,
        energy=_ratio(float(energy.sum()), float(every.sum())),
        share=Spread.of(shares),
        forbidden=_ratio(numbers["loss_mean"], numbers["loss"]),
        lost=_ratio(numbers["lost"], numbers["loss"]),
        distance=Pair(
            _distance(energy, numbers["sum"]),
            _distance(left, sum_left),
        ),
        diversity=Pair(
            _ratio(clients * float(energy.sum()), numbers["sum"]),
            _ratio(clients * float(left.sum()), sum_left),
        ),
        identity_error=error,
        shares=tuple(None if np.isnan(one) else float(one) for one in shares),
    )


def _distance(energy: Floats, of_sum: float) -> float | None:
    """Mean over all pairs of clients, from the energies and that of the sum."""
    clients = len(energy)
    if clients < 2:
        return None
    return max(0.0, 2.0 * (clients * float(energy.sum()) - of_sum) / (clients * (clients - 1)))


def _left(whole: npt.ArrayLike, mean: npt.ArrayLike) -> Floats:
    left = np.subtract(whole, mean)
    return np.where(left > ROUNDING * np.asarray(whole), left, 0.0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _inputs(leaf: Tensor, axes: tuple[int, ...]) -> int:
    """Entries of one client's tensor that a mean runs over."""
    return int(np.prod([leaf.shape[axis] for axis in axes]))


def _means(stacked: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Means over the inputs, one row per client."""
    rank = stacked.ndim - 1
    return stacked.mean([axis % rank + 1 for axis in axes]).flatten(1)
