"""E7 and E8: a network's stationary points, and curvature under projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn.functional import linear

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.algorithms.projection import projected_axes
from fedzmg.models.layout import layout_of
from fedzmg.theory import descent
from fedzmg.theory.finding import Finding, Size, check
from fedzmg.theory.problems import REAL, eye, normal, quadratics, regressions, seeded
from fedzmg.tree import Tree

INPUTS, HIDDEN, L2 = 6, 5, 0.03


class Net:
    """Tanh network with a smooth, non-convex loss on fixed examples; a model is one vector."""

    def __init__(self, seed: int) -> None:
        generator = seeded(seed)
        self.module = nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
        ).to(REAL)  # fmt: skip
        # A positive mean of the inputs gives the gradient a mean component.
        self.x = normal(generator, 80, INPUTS) + 1.0
        self.y = torch.tanh(self.x @ normal(generator, INPUTS, 2)).sum(-1, keepdim=True)
        self.y += 0.1 * normal(generator, 80, 1)
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self.start = torch.cat(
            [normal(generator, *s).flatten() / s[-1] ** 0.5 for s in self.shapes.values()]
        )
        rule = ZeroMean(SGD()).for_layout(layout_of(self.module))
        centred = (rule.centred(self.tree(row)) for row in eye(len(self.start)))
        self.phi = torch.stack([torch.cat([*map(torch.flatten, row.values())]) for row in centred])
        """``Phi`` of the package's rule as a matrix; biases are free."""

    def tree(self, vector: Tensor) -> Tree:
        """Split a vector into the shapes of the parameters."""
        parts = vector.split_with_sizes([math.prod(shape) for shape in self.shapes.values()])
        named = zip(self.shapes.items(), parts, strict=True)
        return Tree({name: part.view(shape) for (name, shape), part in named})

    def loss(self, vector: Tensor) -> Tensor:
        """Compute half the mean squared error plus an l2 term, which isolates minima."""
        first, first_bias, second, second_bias = self.tree(vector).values()
        off = linear(torch.tanh(linear(self.x, first, first_bias)), second, second_bias) - self.y
        return 0.5 * off.square().mean() + 0.5 * L2 * vector.square().sum()

    def gradient(self, vector: Tensor) -> Tensor:
        """Compute the gradient."""
        tracked = vector.detach().requires_grad_()
        [found] = torch.autograd.grad(self.loss(tracked), [tracked])
        return found

    def curvature(self, vector: Tensor) -> Tensor:
        """Compute the Hessian by automatic differentiation."""
        found: Tensor = hessian(self.loss, vector)  # type: ignore[no-untyped-call]
        return found


@check(
    "E7",
    "A non-convex network",
    "FedZMG ends where the gradient is constant along the inputs of every unit: a stationary "
    "point of the loss under fixed column sums, not of the loss",
)
def _stationary(_size: Size, found: Finding) -> None:
    steps = 700
    found.setting = (
        f"tanh network {INPUTS}-{HIDDEN}-1 with biases, l2 {L2}, 80 examples, momentum 0.95, "
        f"{steps:,} full steps"
    )
    net = Net(107)
    params, velocity, norms = net.start, torch.zeros_like(net.start), []
    for _ in range(steps):
        gradient = net.gradient(params)
        centred = net.phi @ gradient
        norms.append((float(gradient.norm()), float(centred.norm())))
        velocity = 0.95 * velocity + centred
        params = params - 0.1 * velocity
    gradient, curvature = net.gradient(params), net.curvature(params)
    moved = net.tree(params - net.start)
    axes = projected_axes(layout_of(net.module))
    sums = torch.cat([moved[name].sum(over) for name, over in axes.items() if over])
    # One zero per column; the rest is the curvature on the constraint set.
    values = torch.linalg.eigvalsh(net.phi @ curvature @ net.phi)
    least = float(values.sort().values[len(sums)]) if float(values.min()) > -1e-9 else math.nan
    # The removed direction is one of descent.
    free = params - (0.1 / float(torch.linalg.eigvalsh(curvature).max())) * gradient
    gain = net.loss(params) - net.loss(free)
    found.zero("|Phi grad F| / |grad F| at the end", (net.phi @ gradient).norm() / gradient.norm(),
               1e-4)  # fmt: skip
    found.add("|grad F| at the end, at least", 1e-3, gradient.norm(), rule="at least")
    found.zero("drift of a column sum, largest", sums, 1e-12)
    found.add("least curvature on the constraint set", 0.0, least, rule="at least")
    found.add("decrease of F by one unprojected step, above", 0.0, gain, -1e-9, "at least")
    for name, curve in zip(("|grad F|", "|Phi grad F|"), zip(*norms, strict=True), strict=True):
        found.series[name] = (list(range(1, steps + 1, 20)), curve[::20])


@check(
    "E8",
    "Lipschitz constant of the gradient",
    "lambda_max(Phi H Phi) <= lambda_max(H)",
    "where lambda_max(H) >= 0, and always for the spectral norm",
)
def _curvature(size: Size, found: Finding) -> None:
    found.setting = (
        f"{size.problems} quadratics, logistic regression at 20 points, the tanh network at 4 "
        "points, its Hessian by automatic differentiation"
    )
    generator = seeded(108)
    many, regression, net = (
        quadratics(generator, problems=(size.problems,)), regressions(generator), Net(108),
    )  # fmt: skip
    points = [normal(generator, regression.dims) for _ in range(20)]
    hessians = {
        "quadratics": many.mean_curvature,
        "logistic regression": torch.stack([regression.hessian(point) for point in points]),
        "network": torch.stack(
            [net.curvature(scale * net.start) for scale in (0.3, 1.0, 2.0, 4.0)]
        ),
    }
    for name, matrices in hessians.items():
        phi = net.phi if name == "network" else descent.zero_mean(eye(matrices.shape[-1]))
        whole, inside = torch.linalg.eigvalsh(torch.stack([matrices, phi @ matrices @ phi]))
        ratios = inside[:, -1] / whole[:, -1]
        found.add(f"{name}: lambda_max(Phi H Phi) / lambda_max(H), largest", 1.0, ratios, 1e-9,
                  "at most", stated=True)  # fmt: skip
        found.series[name] = (list(range(len(ratios))), ratios.sort().values.tolist())
    norms = inside.abs().amax(-1) / whole.abs().amax(-1)
    phi = descent.zero_mean(eye(many.dims))
    # A quadratic whose steepest direction is projected away.
    steep = torch.linalg.eigvalsh(phi @ (eye(many.dims) + 1.0) @ phi).max() / (1 + many.dims)
    found.add("H = -I: lambda_max(Phi H Phi)", -1.0, torch.linalg.eigvalsh(-phi @ phi), 1e-9,
              "at most", stated=True)  # fmt: skip
    found.add("network: |Phi H Phi| / |H|, largest", 1.0, norms, 1e-9, "at most")
    found.add("network: least eigenvalue of H, below zero", 0.0, whole.min(), -1e-3, "at most")
    found.add("H = I + 11': lambda_max(Phi H Phi) / lambda_max(H), 1/(1+d)", 1.0 / (1 + many.dims),
              steep, 1e-9)  # fmt: skip
