"""T11, T12 and E9: networks and adaptive servers, trained by the package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedzmg import tasks
from fedzmg.algorithms.projection import projected_axes
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import initial_params
from fedzmg.simulation import Trial, simulate
from fedzmg.tasks.task import Task
from fedzmg.theory import descent
from fedzmg.theory.finding import Finding, Series, Size, check
from fedzmg.theory.problems import REAL, normal, seeded
from fedzmg.tree import Tree


def trained(task: Task, rounds: int, name: str = "fedzmg", **options: Any) -> list[Tree]:
    """Train in double precision; return the model at the start and after every round."""
    models = [initial_params(task.model, task.init, 0).map(lambda leaf: leaf.to(REAL))]
    # Evaluations are not used: one suffices.
    quiet = replace(task, protocol=replace(task.protocol, eval_every=rounds))
    simulate(
        quiet, [Trial.of(name, **options)], rounds=rounds, device="cpu", dtype=REAL,
        engine="vectorized",
        observer=lambda report: models.append(
            report.simulation.checkpoint(0).params().map(Tensor.clone)
        ),
    )  # fmt: skip
    return models


def small_cnn() -> nn.Sequential:
    """Build a convolution and two dense layers for 28x28 images, 3,426 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 4, 5, stride=4, padding=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 7 * 7, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


@check(
    "T11",
    "Column sums in a network",
    "without decay every kernel's sums over its inputs stay as they were initialised",
)
def _column_sums(size: Size, found: Finding) -> None:
    task = replace(tasks.get("digits"), model=FunctionalModel(small_cnn()))
    decay, rate, rounds = 0.01, 0.05, min(size.rounds, 6)
    axes = {name: over for name, over in projected_axes(task.model.layout).items() if over}
    found.setting = (
        f"digits, small CNN with {len(axes)} kernels, this package's fedzmg in float64, "
        f"momentum 0.9, {rounds} rounds of 5 clients"
    )

    def change(factor: float, **options: Any) -> Tensor:
        """Train and compare every column sum with a multiple of the first one."""
        start, *_, end = trained(task, rounds, client_lr=rate, **options)
        pairs = ((end[n].sum(over), start[n].sum(over)) for n, over in axes.items())
        return torch.cat([(after - factor * before).flatten() for after, before in pairs])

    # Fifty images, two epochs, batches of ten: ten steps per client and round.
    factor = (1.0 - decay * rate) ** (10 * rounds)
    free = change(1.0, client_decay=0.0, client_project="none").abs().max()
    found.zero("change of a column sum, largest", change(1.0, client_decay=0.0), 1e-12, stated=True)
    found.zero(f"lambda = {decay}: off prod (1 - lambda lr), largest",
               change(factor, client_decay=decay), 1e-12)  # fmt: skip
    found.add("without projection: largest change, at least", 1e-3, free, rule="at least")


@check(
    "T12",
    "Energy of the mean component",
    "of a dense layer's gradient, projection removes mean(x)^2 / mean(x^2) of every example",
)
def _mean_energy(size: Size, found: Finding) -> None:
    width, examples = 512, max(256, size.samples // 200)
    found.setting = (
        f"dense layer of {width} inputs, {examples:,} examples; digits; then the digits CNN along "
        f"{size.rounds} rounds"
    )
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
               torch.cat(removed) - torch.cat(formulas), 1e-12, stated=True)  # fmt: skip
    for (name, (_, predicted, tolerance)), one, formula in zip(
        inputs.items(), removed, formulas, strict=True
    ):
        expected = float(formula.mean()) if math.isnan(predicted) else predicted
        found.add(name, expected, one.mean(), tolerance)
    centred = removed_shares(descent.zero_mean(pixels), generator)
    found.zero("digits, each image centred", float(centred.mean()), 1e-12)
    found.series = _along_training(size)
    first = min(y[0] for name, (_, y) in found.series.items() if name.startswith("layer 1"))
    found.add("first convolution of the CNN, at least half at the start", 0.5, first,
              rule="at least")  # fmt: skip


def removed_shares(x: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the removed share of the first layer's gradient, example by example.

    Every example has its own copy of the kernel, hence its own gradient.
    """
    examples, inputs = x.shape
    kernel = (normal(generator, 6, inputs) / inputs**0.5).expand(examples, -1, -1)
    kernel = kernel.clone().requires_grad_()
    head = normal(generator, 6)
    # Softplus has no dead units and no zero gradients.
    hidden = torch.nn.functional.softplus((kernel @ x[..., None]).squeeze(-1))
    loss = (hidden @ head).square().sum() + (hidden @ head).sum()
    [gradients] = torch.autograd.grad(loss, [kernel])
    left = descent.zero_mean(gradients)
    return 1.0 - (left**2).sum((1, 2)) / (gradients**2).sum((1, 2))


def _along_training(size: Size) -> Series:
    """Measure the mean share by layer after every round of FedZMG on digits."""
    task = tasks.get("digits")
    model = task.model.to(torch.device("cpu"), REAL)
    axes = {name: over for name, over in projected_axes(task.model.layout).items() if over}
    ends = task.train.offsets[: min(8, 2 * size.rounds) + 1].tolist()
    clients = [slice(*pair) for pair in pairwise(ends)]
    x, y = task.prepare(task.train.examples.x[: ends[-1]].clone(), REAL), task.train.examples.y

    def share(params: Mapping[str, Tensor], own: slice) -> list[float]:
        weights = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        loss = task.loss(model.evaluate(Tree(weights), x[own]), y[own]).mean()
        gradients = torch.autograd.grad(loss, [weights[name] for name in axes])
        lefts = map(descent.zero_mean, gradients, axes.values())
        return [
            1.0 - float((left**2).sum() / (leaf**2).sum())
            for left, leaf in zip(lefts, gradients, strict=True)
        ]

    models = trained(task, size.rounds, client_lr=0.03)
    shares = torch.tensor([[share(one, own) for own in clients] for one in models], dtype=REAL)
    kinds = {"Conv2d": "convolution", "Linear": "dense"}
    return {
        f"layer {i + 1}, {kinds.get(task.model.layout[name].layer, 'layer')}": (
            list(range(size.rounds + 1)), shares[..., i].mean(1).tolist(),
        )
        for i, name in enumerate(axes)
    }  # fmt: skip


@check(
    "E9",
    "Adaptive servers",
    "zero-mean clients keep the column sums, whatever the server does with their updates",
    "for averaging servers; an adaptive one must project its own step",
)
def _adaptive_server(size: Size, found: Finding) -> None:
    rounds = 3 * size.rounds
    found.setting = f"this package on its task quadratic in float64, {rounds} rounds, no decay"
    task = tasks.get("quadratic", {"distance": "constrained"})
    for name, algorithm, tolerance, stated in (
        ("server average: drift of 1'w_t, largest", "fedzmg", 1e-11, True),
        ("Adam on the server: drift of 1'w_t, largest", "fedzmg-adam", 1e-6, True),
        ("Adam, its step projected: drift, largest", "fedzmg-adam:projected", 1e-11, False),
    ):
        models = trained(task, rounds, algorithm, client_lr=0.02, client_decay=0.0)
        sums = torch.stack([model["weight"].sum() for model in models])
        found.zero(name, sums - sums[0], tolerance, stated=stated)
