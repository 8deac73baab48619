"""T11, T12, E7 to E9: networks and adaptive servers."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, grad

from fedzmg import tasks
from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import initial_params
from fedzmg.models.layout import layout_of
from fedzmg.simulation import Trial, simulate
from fedzmg.tasks.task import Task
from fedzmg.theory import descent
from fedzmg.theory.finding import Finding, Size, check
from fedzmg.theory.problems import REAL, Logistic, Quadratics, eye, normal, seeded
from fedzmg.tree import Tree
from fedzmg.wrappers.projection import projected_axes

INPUTS, HIDDEN, L2 = 6, 5, 0.03


def trained(task: Task, rounds: int, name: str = "fedzmg", **options: Any) -> list[Tree]:
    """Train in double precision; return the model at the start and after every round."""
    models = [initial_params(task.model, task.init, 0).map(lambda leaf: leaf.to(REAL))]
    # Evaluations are not used: one suffices.
    quiet = replace(task, protocol=replace(task.protocol, eval_every=rounds))
    simulate(
        quiet, [Trial.of(name, **options)], rounds=rounds, device="cpu", dtype=REAL,
        engine="vectorized",
        observer=lambda r: models.append(r.simulation.checkpoint(0).params().map(Tensor.clone)),
    )  # fmt: skip
    return models


@check("T11", "Column sums in a network")
def _column_sums(size: Size, found: Finding) -> None:
    """Without decay every kernel's sums over its inputs stay as they were initialised."""
    small_cnn = nn.Sequential(
        nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 4, 5, stride=4, padding=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 7 * 7, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip
    task = replace(tasks.get("digits"), model=FunctionalModel(small_cnn))
    decay, rate, rounds = 0.01, 0.05, min(size.rounds, 6)
    axes = {name: over for name, over in projected_axes(task.model.layout).items() if over}
    found.setting = f"digits, small CNN with {len(axes)} kernels, this package's fedzmg in "
    found.setting += f"float64, momentum 0.9, {rounds} rounds of 5 clients"

    def change(factor: float, **options: Any) -> Tensor:
        """Train and compare every column sum with a multiple of the first one."""
        start, *_, end = trained(task, rounds, client_lr=rate, **options)
        pairs = ((end[n].sum(over), start[n].sum(over)) for n, over in axes.items())
        return torch.cat([(after - factor * before).flatten() for after, before in pairs])

    # Fifty images, two epochs, batches of ten: ten steps per client and round.
    factor = (1.0 - decay * rate) ** (10 * rounds)
    free = change(1.0, client_decay=0.0, client_project="none").abs().max()
    found.zero("change of a column sum, largest", change(1.0, client_decay=0.0), 1e-12)
    found.zero(f"lambda = {decay}: off prod (1 - lambda lr), largest",
               change(factor, client_decay=decay), 1e-12)  # fmt: skip
    found.at_least("without projection: largest change, at least", 1e-3, free)


@check("T12", "Energy of the mean component")
def _mean_energy(size: Size, found: Finding) -> None:
    """Projection removes mean(x)^2 / mean(x^2) of every example's gradient in a dense layer."""
    width, examples = 512, max(256, size.samples // 200)
    found.setting = f"dense layer of {width} inputs, {examples:,} examples; digits"
    generator = seeded(12)
    gauss = normal(generator, examples, width)
    uniform = torch.rand(examples, width, generator=generator, dtype=REAL)
    task = tasks.get("digits")
    pixels = task.prepare(task.train.examples.x[:examples], REAL).flatten(1)
    # Five standard errors; finite width adds an error of about 1/width.
    error, wide = 5.0 * (2.0 / examples) ** 0.5 / width, 4.0 / width
    inputs = {
        "centred Gaussian, 1/d": (gauss, 1.0 / width, error),
        "after a ReLU, 1/pi": (gauss.clamp(min=0.0), 1.0 / math.pi, wide),
        "uniform on [0, 1], 3/4": (uniform, 0.75, wide),
        "digits, white background, from their pixels": (pixels, math.nan, 1e-9),
    }
    removed = [removed_shares(x, generator) for x, _, _ in inputs.values()]
    formulas = [x.mean(-1) ** 2 / (x**2).mean(-1) for x, _, _ in inputs.values()]
    found.zero("removed share - mean(x)^2 / mean(x^2), largest",
               torch.cat(removed) - torch.cat(formulas), 1e-12)  # fmt: skip
    measured = zip(inputs.items(), removed, formulas, strict=True)
    for (name, (_, predicted, tolerance)), one, formula in measured:
        expected = float(formula.mean()) if math.isnan(predicted) else predicted
        found.add(name, expected, one.mean(), tolerance)
    centred = removed_shares(descent.zero_mean(pixels), generator)
    found.zero("digits, each image centred", float(centred.mean()), 1e-12)


def removed_shares(x: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the removed share of the first layer's gradient, example by example."""
    examples, inputs = x.shape
    # Every example has its own copy of the kernel, hence its own gradient.
    kernel = (normal(generator, 6, inputs) / inputs**0.5).expand(examples, -1, -1)
    kernel = kernel.clone().requires_grad_()
    head = normal(generator, 6)
    # Softplus has no dead units and no zero gradients.
    hidden = torch.nn.functional.softplus((kernel @ x[..., None]).squeeze(-1))
    loss = (hidden @ head).square().sum() + (hidden @ head).sum()
    [gradients] = torch.autograd.grad(loss, [kernel])
    return 1.0 - (descent.zero_mean(gradients) ** 2).sum((1, 2)) / (gradients**2).sum((1, 2))


@check("E9", "Adaptive servers")
def _adaptive_server(size: Size, found: Finding) -> None:
    """Zero-mean clients keep the column sums, whatever the server does with their updates."""
    found.remedy = "for averaging servers; an adaptive one must project its own step"
    rounds = 3 * size.rounds
    found.setting = f"this package on its task quadratic in float64, {rounds} rounds, no decay"
    task = tasks.get("quadratic", {"distance": "constrained"})

    def drift(algorithm: str) -> Tensor:
        models = trained(task, rounds, algorithm, client_lr=0.02, client_decay=0.0)
        sums = torch.stack([model["weight"].sum() for model in models])
        return sums - sums[0]

    found.zero("server average: drift of 1'w_t, largest", drift("fedzmg"), 1e-11)
    found.zero("Adam on the server: drift of 1'w_t, largest", drift("fedzmg-adam"), 1e-6,
               basis="not claimed")  # fmt: skip
    found.zero("Adam, its step projected: drift, largest", drift("fedzmg-adam:projected"), 1e-11)


class Net:
    """Tanh network with a smooth, non-convex loss on fixed examples; a model is one vector."""

    def __init__(self, seed: int) -> None:
        generator = seeded(seed)
        layers = nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
        self.module = nn.Sequential(*layers).to(REAL)
        # A positive mean of the inputs gives the gradient a mean component.
        self.x = normal(generator, 80, INPUTS) + 1.0
        self.y = torch.tanh(self.x @ normal(generator, INPUTS, 2)).sum(-1, keepdim=True)
        self.y += 0.1 * normal(generator, 80, 1)
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        drawn = [normal(generator, *s).flatten() / s[-1] ** 0.5 for s in self.shapes.values()]
        self.start = torch.cat(drawn)
        rule = ZeroMean(SGD()).for_layout(layout_of(self.module))
        centred = (rule.changed(self.tree(row)) for row in eye(len(self.start)))
        # Phi of the package's rule as a matrix; biases are free.
        self.phi = torch.stack([torch.cat([*map(torch.flatten, row.values())]) for row in centred])

    def tree(self, vector: Tensor) -> Tree:
        """Split a vector into the shapes of the parameters."""
        parts = vector.split_with_sizes([math.prod(shape) for shape in self.shapes.values()])
        named = zip(self.shapes.items(), parts, strict=True)
        return Tree({name: part.view(shape) for (name, shape), part in named})

    def loss(self, vector: Tensor) -> Tensor:
        """Compute half the mean squared error plus an l2 term, which isolates minima."""
        off: Tensor = functional_call(self.module, dict(self.tree(vector)), self.x) - self.y
        return 0.5 * off.square().mean() + 0.5 * L2 * vector.square().sum()


@check("E7", "A non-convex network")
def _stationary(_size: Size, found: Finding) -> None:
    """FedZMG ends where the gradient is constant along the inputs of every unit.

    This is a stationary point of the loss under fixed column sums, not of the loss.
    """
    steps = 700
    found.setting = f"tanh network {INPUTS}-{HIDDEN}-1 with biases, l2 {L2}, 80 examples, momentum "
    found.setting += f"0.95, {steps:,} full steps"
    net = Net(107)
    params, velocity, norms = net.start, torch.zeros_like(net.start), []
    for _ in range(steps):
        gradient = grad(net.loss)(params)
        centred = net.phi @ gradient
        norms.append((float(gradient.norm()), float(centred.norm())))
        velocity = 0.95 * velocity + centred
        params = params - 0.1 * velocity
    gradient, curvature = grad(net.loss)(params), hessian(net.loss, params)  # type: ignore[no-untyped-call]
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
    found.at_least("|grad F| at the end, at least", 1e-3, gradient.norm())
    found.zero("drift of a column sum, largest", sums, 1e-12)
    found.at_least("least curvature on the constraint set", 0.0, least)
    found.at_least("decrease of F by one unprojected step, above", 0.0, gain, -1e-9)
    for name, curve in zip(("|grad F|", "|Phi grad F|"), zip(*norms, strict=True), strict=True):
        found.series[name] = (list(range(1, steps + 1, 20)), curve[::20])


@check("E8", "Lipschitz constant of the gradient")
def _curvature(size: Size, found: Finding) -> None:
    """|Phi H Phi| <= |H| in the spectral norm: projection never raises the Lipschitz constant.

    It falls at most to the next eigenvalues, max(lambda_2, -lambda_(d-1)), per direction removed.
    """
    number = size.samples // 10
    found.setting = f"{size.problems} quadratics, logistic regression at 20 points, the tanh "
    found.setting += f"network at 4 points; {number:,} random symmetric matrices, d = 12"
    generator = seeded(108)
    many, regression = Quadratics.draw(generator, size.problems, 8), Logistic.draw(generator)
    net, points = Net(108), normal(generator, 20, regression.dims)
    drawn = normal(generator, number, many.dims, many.dims)
    # A shift by multiples of I makes some of them definite, of either sign.
    shifts = 5.0 * normal(generator, len(drawn), 1, 1) * eye(many.dims)
    hessians = {
        "quadratics": many.mean_curvature,
        "logistic regression": torch.stack([regression.hessian(point) for point in points]),
        "network": torch.stack([hessian(net.loss, n * net.start) for n in (0.3, 1.0, 2.0, 4.0)]),  # type: ignore[no-untyped-call]
        "random matrices": drawn + drawn.mT + shifts,
    }
    for name, matrices in hessians.items():
        phi = net.phi if name == "network" else descent.zero_mean(eye(matrices.shape[-1]))
        whole, inside = torch.linalg.eigvalsh(torch.stack([matrices, phi @ matrices @ phi]))
        ratios = inside.abs().amax(-1) / whole.abs().amax(-1)
        found.at_most(f"{name}: |Phi H Phi| / |H|, largest", 1.0, ratios, 1e-9)
        if name == "network":
            found.at_most("network: least eigenvalue of H, below zero", 0.0, whole.min(), -1e-3)
    least = inside.abs().amax(-1) - torch.maximum(whole[:, -2], -whole[:, 1])
    found.at_least("random matrices: |Phi H Phi| - that limit, smallest", 0.0, least, 1e-9)
    # A quadratic whose steepest direction is projected away.
    steep = torch.linalg.eigvalsh(phi @ (eye(many.dims) + 1.0) @ phi).max() / (1 + many.dims)
    found.add("H = I + 11': |Phi H Phi| / |H|, 1/(1+d)", 1.0 / (1 + many.dims), steep, 1e-9)
