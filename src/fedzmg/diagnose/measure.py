"""Measure the part of clients' gradients that the zero-mean projection removes, by layer.

Gradients arrive a few clients at a time: memory does not grow with the number of clients. With
``g`` a client's gradient of one weight, ``d`` inputs per output unit and ``nu`` the means over the
inputs, the mean component has the energy ``d |nu|^2``. The projection removes exactly that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.contract import Layout
from fedzmg.tree import Tree
from fedzmg.wrappers.projection import projected_axes

Floats = npt.NDArray[np.float64]
Part = tuple[Tree, Floats]  # gradients of some clients (first axis) and their weights

WHOLE = "whole model"
ROUNDING = 1e-12  # relative energies below this are rounding errors


@dataclass(frozen=True)
class ClientSpread:
    """Statistics of one value per client; None where no client has one."""

    mean: float | None
    sd: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Floats) -> "ClientSpread":
        found = values[np.isfinite(values)]
        if not len(found):
            return cls(None, None, None, None)
        sd = float(found.std(ddof=1)) if len(found) > 1 else None
        return cls(float(found.mean()), sd, float(found.min()), float(found.max()))


@dataclass(frozen=True)
class Pair:
    """Quantity before and after the projection; None where undefined."""

    before: float | None
    after: float | None

    @property
    def kept(self) -> float | None:
        """Ratio of after to before; None if before is zero."""
        if self.before is None or self.after is None or self.before <= 0.0:
            return None
        return self.after / self.before


@dataclass(frozen=True)
class Layer:
    """Measurement of one projected weight, or of the whole model."""

    name: str
    kind: str  # type of the layer, such as ``Conv2d``
    inputs: int  # number of entries per mean; 0 for the whole model
    parameters: int
    energy: float | None  # this layer's share of all clients' gradient energy
    share: ClientSpread  # mean component's share of the energy of each client's gradient
    forbidden: float | None  # mean component's share of the loss gradient (averaged)
    lost: float | None  # part of ``forbidden`` that no bias can replace; see :func:`measure`
    distance: Pair  # mean squared distance between the gradients of two clients
    diversity: Pair  # n sum |g_k|^2 / |sum g_k|^2: 1 if clients agree, n if orthogonal
    shares: tuple[float | None, ...]


@dataclass(frozen=True)
class Measurement:
    """All layers of a model, and the model as a whole."""

    layers: tuple[Layer, ...]
    whole: Layer
    round: int = 0
    drift: dict[str, Pair] = field(default_factory=dict)
    """Mean squared distance of local models from their mean, plain and projected, by layer; empty
    if it was not measured or local training diverged."""


def measure(parts: Iterable[Part], layout: Layout) -> Measurement:
    """Measure clients' gradients.

    The projection forbids the mean component of the averaged gradient; a bias can replace part of
    it. If the mean ``m`` of a unit's inputs is the same for all examples, a bias moves its output
    like all of its weights together. Hence ``nu = m beta + rest`` with ``beta`` the gradient of the
    bias and one ``m`` per layer, by least squares over units and clients; the rest is lost. The
    layer after an embedding can undo the shift, and nothing is lost.

    Weights of ``parts`` need not sum to one. Layers are measured in the order of ``layout``.
    """
    sums, weight = _summed(parts, layout)
    energies = {name: torch.cat(one.energy).numpy() for name, one in sums.items()}
    removed = {name: torch.cat(one.mean_energy).numpy() for name, one in sums.items()}
    every: Floats = np.sum(list(energies.values()), axis=0)
    total = dict.fromkeys(("sum", "sum_mean", "loss", "loss_mean", "lost"), 0.0)
    layers = []
    for name, info in layout.items():
        one = sums[name]
        numbers = one.energies(weight, sums.get(one.bias), embedding=info.layer == "Embedding")
        total = {key: value + numbers[key] for key, value in total.items()}
        if one.inputs:
            names, shape = (name, info.layer), (one.inputs, one.parameters)
            layers.append(_layer(names, shape, energies[name], removed[name], every, numbers))
    shape = 0, sum(one.parameters for one in sums.values())
    whole: Floats = np.sum(list(removed.values()), axis=0)
    return Measurement(tuple(layers), _layer((WHOLE, ""), shape, every, whole, every, total))


def spread_of(parts: Iterable[Part], layout: Layout) -> dict[str, float]:
    """Compute the weighted mean squared distance of clients from their mean, by parameter."""
    sums, weight = _summed(parts, layout)
    if not weight:
        return {}
    found = {}
    for name, one in sums.items():
        value = (one.weighted_energy - float(one.sums[2].square().sum()) / weight) / weight
        # Rounding can make a difference of large numbers negative; NaN stays.
        found[name] = 0.0 if value < 0.0 else value
    return {**found, WHOLE: sum(found.values())}


def _summed(parts: Iterable[Part], layout: Layout) -> "tuple[dict[str, _Sums], float]":
    """Return sums over clients by parameter, and the sum of their weights."""
    sums, weight = {name: _Sums(axes) for name, axes in projected_axes(layout).items()}, 0.0
    for name, one in sums.items():
        owner, dot, own = name.rpartition(".")
        bias = owner + dot + own.replace("weight", "bias")
        if bias != name and bias in layout and layout[bias].role == "bias":
            one.bias = bias
    for gradients, weights in parts:
        share = torch.from_numpy(np.asarray(weights, dtype=np.float64))
        weight += float(share.sum())
        wide = {name: leaf.detach().to("cpu", torch.float64) for name, leaf in gradients.items()}
        for name, leaf in wide.items():
            sums[name].add(leaf, share, wide.get(sums[name].bias))
    return sums, weight


class _Sums:
    """Sums over clients of one parameter's gradient and its means, in double precision."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes, self.bias = axes, ""  # name of the bias of the same layer
        self.inputs = self.parameters = 0
        self.weighted_energy = 0.0
        self.energy: list[Tensor] = []
        self.mean_energy: list[Tensor] = []
        self.sums: list[Any] = [0.0] * 4  # gradients and their means, plain and weighted
        self._fit = torch.zeros(2, dtype=torch.float64)

    def add(self, gradients: Tensor, share: Tensor, bias: Tensor | None) -> None:
        """Add some clients, with the gradients of the layer's bias."""
        flat, rank = gradients.flatten(1), gradients.ndim - 1
        means = flat[:, :0]
        self.parameters = flat.shape[1]
        if self.axes:
            means = gradients.mean([axis % rank + 1 for axis in self.axes]).flatten(1)
            self.inputs = self.parameters // means.shape[1]
        self.energy.append(flat.square().sum(1))
        self.weighted_energy += float(share @ self.energy[-1])
        self.mean_energy.append(self.inputs * means.square().sum(1))
        new = flat.sum(0), means.sum(0), share @ flat, share @ means
        self.sums = [old + one for old, one in zip(self.sums, new, strict=True)]
        if bias is not None and bias.flatten(1).shape == means.shape:
            beta = bias.flatten(1)
            self._fit += torch.stack([(means * beta).sum(), beta.square().sum()])

    def energies(self, weight: float, bias: "_Sums | None", *, embedding: bool) -> dict[str, float]:
        """Compute the energies of the summed and of the averaged gradient, and of their means."""
        total, total_means, loss, means = self.sums
        found = {
            "sum": float(total.square().sum()),
            "sum_mean": self.inputs * float(total_means.square().sum()),
            "loss": float((loss / weight).square().sum()),
            "loss_mean": self.inputs * float((means / weight).square().sum()),
        }
        lost = 0.0 if embedding else found["loss_mean"]
        if bias is not None and self._fit[1] > 0 and self.inputs > 1:
            rest = (means - self._fit[0] / self._fit[1] * bias.sums[2]) / weight
            # A bias need not be used: it cannot make things worse.
            lost = min(lost, self.inputs * float(rest.square().sum()))
        return {**found, "lost": lost}


def _layer(
    names: tuple[str, str], shape: tuple[int, int], energy: Floats, mean: Floats, every: Floats,
    numbers: Mapping[str, float],
) -> Layer:  # fmt: skip
    clients = len(energy)
    shares = np.divide(mean, energy, out=np.full(clients, np.nan), where=energy > 0)
    left, sum_left = _left(energy, mean), float(_left(numbers["sum"], numbers["sum_mean"]))
    both = (energy, numbers["sum"]), (left, sum_left)
    return Layer(
        *names, *shape, _ratio(float(energy.sum()), float(every.sum())), ClientSpread.of(shares),
        forbidden=_ratio(numbers["loss_mean"], numbers["loss"]),
        lost=_ratio(numbers["lost"], numbers["loss"]),
        distance=Pair(*(_distance(own, whole) for own, whole in both)),
        diversity=Pair(*(_ratio(clients * float(own.sum()), whole) for own, whole in both)),
        shares=tuple(None if np.isnan(one) else float(one) for one in shares),
    )  # fmt: skip


def _distance(energy: Floats, of_sum: float) -> float | None:
    """Average over all pairs of clients, from their energies and that of the sum."""
    clients = len(energy)
    if clients < 2:
        return None
    return max(0.0, 2.0 * (clients * float(energy.sum()) - of_sum) / (clients * (clients - 1)))


def _left(whole: npt.ArrayLike, mean: npt.ArrayLike) -> Floats:
    left = np.subtract(whole, mean)
    return np.where(left > ROUNDING * np.asarray(whole), left, 0.0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None
