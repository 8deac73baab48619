"""E7 to E9: a network's stationary points, curvature under projection, and adaptive servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

from fedzmg import algorithms, tasks
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.algorithms.options import configure
from fedzmg.algorithms.projection import projected_axes
from fedzmg.algorithms.sgd import SGD
from fedzmg.models.layout import layout_of
from fedzmg.simulation import RoundReport, Trial, simulate
from fedzmg.theory import descent
from fedzmg.theory.finding import Finding, Size, Value
from fedzmg.theory.logistic import regressions
from fedzmg.theory.problems import REAL, normal, quadratics, seeded
from fedzmg.tree import Tree

INPUTS, HIDDEN, L2 = 6, 5, 0.03


class Net:
    """Tanh network with a smooth, non-convex loss on fixed examples."""

    def __init__(self, seed: int) -> None:
        generator = seeded(seed)
        self.module = nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
        ).to(REAL)  # fmt: skip
        # A positive mean of the inputs gives the gradient a mean component.
        self.x = normal(generator, 80, INPUTS) + 1.0
        self.y = torch.tanh(self.x @ normal(generator, INPUTS, 2)).sum(-1, keepdim=True)
        self.y += 0.1 * normal(generator, 80, 1)
        self.layout = layout_of(self.module)
        self.rule = ZeroMean(SGD()).for_layout(self.layout)
        self.start = Tree(
            {
                name: normal(generator, *p.shape) / p.shape[-1] ** 0.5
                for name, p in self.module.named_parameters()
            }
        )

    def loss(self, params: Mapping[str, Tensor]) -> Tensor:
        """Compute half the mean squared error plus an l2 term, which isolates minima."""
        hidden = torch.tanh(self.x @ params["0.weight"].mT + params["0.bias"])
        off = hidden @ params["2.weight"].mT + params["2.bias"] - self.y
        flat = torch.cat([leaf.reshape(-1) for leaf in params.values()])
        return 0.5 * off.square().mean() + 0.5 * L2 * flat.square().sum()

    def gradient(self, params: Tree) -> Tree:
        """Compute the gradient."""
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        found = torch.autograd.grad(self.loss(leaves), list(leaves.values()))
        return Tree(dict(zip(leaves, found, strict=True)))

    def curvature(self, params: Tree) -> Tensor:
        """Compute the Hessian as one matrix by automatic differentiation."""

        def flat_loss(vector: Tensor) -> Tensor:
            return self.loss(self._tree(vector))

        found: Tensor = hessian(flat_loss, _flat(params))  # type: ignore[no-untyped-call]
        return found

    def projector(self) -> Tensor:
        """Compute ``Phi`` of the package's rule as a matrix; biases are free."""
        whole = torch.eye(len(_flat(self.start)), dtype=REAL)
        return torch.stack([_flat(self.rule.centred(Tree(self._tree(row)))) for row in whole])

    def _tree(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a vector into the shapes of the parameters."""
        out, first = {}, 0
        for name, leaf in self.start.items():
            out[name] = vector[first : first + leaf.numel()].view(leaf.shape)
            first += leaf.numel()
        return out


def _flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.values()])


def stationary(_size: Size) -> Finding:
    """E7: in a network the projected gradient vanishes, the gradient does not."""
    net = Net(107)
    params, velocity = net.start, net.start.zeros()
    steps = 700
    t, whole, inside = [], [], []
    for step in range(steps):
        gradient = net.gradient(params)
        centred = net.rule.centred(gradient)
        if step % 20 == 0:
            t.append(step + 1.0)
            whole.append(float(_flat(gradient).norm()))
            inside.append(float(_flat(centred).norm()))
        velocity = 0.95 * velocity + centred
        params = params - 0.1 * velocity
    gradient = net.gradient(params)
    left = _flat(net.rule.centred(gradient)).norm()
    axes = projected_axes(net.layout)
    sums = {n: (params[n] - net.start[n]).sum(over) for n, over in axes.items() if over}
    curvature = net.curvature(params)
    phi = net.projector()
    values = torch.linalg.eigvalsh(phi @ curvature @ phi)
    # One zero per column; the rest is the curvature on the constraint set.
    columns = sum(len(total) for total in sums.values())
    least = float(values.sort().values[columns]) if float(values.min()) > -1e-9 else float("nan")
    # The removed direction is one of descent.
    free = params - (0.1 / float(torch.linalg.eigvalsh(curvature).max())) * gradient
    gain = float(net.loss(dict(params.items())) - net.loss(dict(free.items())))
    return Finding(
        "E7",
        "A non-convex network",
        "FedZMG ends where the gradient is constant along the inputs of every unit: a stationary "
        "point of the loss under fixed column sums, not of the loss",
        f"tanh network {INPUTS}-{HIDDEN}-1 with biases, l2 {L2}, 80 examples, momentum 0.95, "
        f"{steps:,} full steps",
        (
            Value("|Phi grad F| / |grad F| at the end", 0.0, float(left / _flat(gradient).norm()),
                  1e-4),
            Value("|grad F| at the end, at least", 1e-3, float(_flat(gradient).norm()), 0.0,
                  "at least"),
            Value("drift of a column sum, largest", 0.0,
                  max(float(total.abs().max()) for total in sums.values()), 1e-12),
            Value("least curvature on the constraint set", 0.0, least, 0.0, "at least"),
            Value("decrease of F by one unprojected step, above", 0.0, gain, -1e-9, "at least"),
        ),
        series={"|grad F|": (t, whole), "|Phi grad F|": (t, inside)},
    )  # fmt: skip


def curvature(size: Size) -> Finding:
    """E8: projection never raises the largest curvature if that is positive."""
    generator = seeded(108)
    many = quadratics(generator, problems=(size.problems,))
    phi = descent.zero_mean(torch.eye(many.dims, dtype=REAL))
    ratios = {"quadratics": _ratios(phi, many.mean_curvature)}
    # A quadratic whose steepest direction is projected away.
    steep = torch.eye(many.dims, dtype=REAL) + torch.ones(many.dims, many.dims, dtype=REAL)
    regression = regressions(generator)
    small = descent.zero_mean(torch.eye(regression.dims, dtype=REAL))
    points = [normal(generator, regression.dims) for _ in range(20)]
    ratios["logistic regression"] = _ratios(
        small, torch.stack([regression.hessian(point) for point in points])
    )
    net = Net(108)
    models = [net.start.map(lambda leaf, s=scale: s * leaf) for scale in (0.3, 1.0, 2.0, 4.0)]
    found = torch.stack([net.curvature(model) for model in models])
    columnwise = net.projector()
    ratios["network"] = _ratios(columnwise, found)
    lowest = float(torch.linalg.eigvalsh(found).min())
    norm = _norms(columnwise @ found @ columnwise) / _norms(found)
    negative = -torch.eye(many.dims, dtype=REAL)
    lines = [
        Value(f"{name}: lambda_max(Phi H Phi) / lambda_max(H), largest", 1.0, float(r.max()), 1e-9,
              "at most", True)
        for name, r in ratios.items()
    ]  # fmt: skip
    lines += [
        Value("H = -I: lambda_max(Phi H Phi)", float(torch.linalg.eigvalsh(negative).max()),
              float(torch.linalg.eigvalsh(phi @ negative @ phi).max()), 1e-9, "at most", True),
        Value("network: |Phi H Phi| / |H|, largest", 1.0, float(norm.max()), 1e-9, "at most"),
        Value("network: least eigenvalue of H, below zero", 0.0, lowest, -1e-3, "at most"),
        Value("H = I + 11': lambda_max(Phi H Phi) / lambda_max(H), 1/(1+d)", 1.0 / (1 + many.dims),
              float(_ratios(phi, steep[None]).max()), 1e-9),
    ]  # fmt: skip
    return Finding(
        "E8",
        "Lipschitz constant of the gradient",
        "lambda_max(Phi H Phi) <= lambda_max(H)",
        f"{size.problems} quadratics, logistic regression at 20 points, the tanh network at 4 "
        "points, its Hessian by automatic differentiation",
        tuple(lines),
        "where lambda_max(H) >= 0, and always for the spectral norm",
        series={
            name: ([float(i) for i in range(len(r))], sorted(r.tolist()))
            for name, r in ratios.items()
        },
    )


def _ratios(phi: Tensor, matrices: Tensor) -> Tensor:
    inside: Tensor = torch.linalg.eigvalsh(phi @ matrices @ phi)
    whole: Tensor = torch.linalg.eigvalsh(matrices)
    return inside[..., -1] / whole[..., -1]


def _norms(matrices: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(matrices)
    return values.abs().amax(-1)


def adaptive_server(size: Size) -> Finding:
    """E9: an adaptive server breaks the sum that the clients conserve."""
    task = tasks.get("quadratic", {"distance": "constrained"})
    rounds = 3 * size.rounds
    quiet = replace(task, protocol=replace(task.protocol, eval_every=rounds))
    start = float(task.model.params()["weight"].to(REAL).sum())
    drifts = {}
    for name in ("fedzmg", "fedzmg-adam", "fedzmg-adam:projected"):
        sums: list[float] = []

        def observe(report: RoundReport, into: list[float] = sums) -> None:
            into.append(float(report.simulation.checkpoint(0).params()["weight"].sum()))

        algorithm = configure(algorithms.get(name), {"client.lr": 0.02, "client.decay": 0.0})
        simulate(quiet, [Trial(algorithm, 0)], rounds=rounds, device="cpu", dtype=REAL,
                 engine="vectorized", observer=observe)  # fmt: skip
        drifts[name] = max(abs(total - start) for total in sums)
    return Finding(
        "E9",
        "Adaptive servers",
        "zero-mean clients keep the column sums, whatever the server does with their updates",
        f"this package on its task quadratic in float64, {rounds} rounds, no decay",
        (
            Value("server average: drift of 1'w_t, largest", 0.0, drifts["fedzmg"], 1e-11,
                  stated=True),
            Value("Adam on the server: drift of 1'w_t, largest", 0.0, drifts["fedzmg-adam"], 1e-6,
                  stated=True),
            Value("Adam, its step projected: drift, largest", 0.0, drifts["fedzmg-adam:projected"],
                  1e-11),
        ),
        "for averaging servers; an adaptive one must project its own step",
    )  # fmt: skip
