"""T11 and T12: conserved sums in a network, and the mean share of its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedzmg import tasks
from fedzmg.algorithms.projection import Axes, projected_axes, zero_mean
from fedzmg.data.federated import Examples
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import initial_params
from fedzmg.simulation import RoundReport, Trial, simulate
from fedzmg.tasks.task import Task
from fedzmg.theory.finding import Finding, Series, Size, Value
from fedzmg.theory.problems import REAL, normal, seeded
from fedzmg.tree import Tree


def small_cnn() -> nn.Sequential:
    """Build a convolution and two dense layers for 28x28 images, 3,426 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, 4, 5, stride=4, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 7 * 7, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def column_sums(size: Size) -> Finding:
    """T11: the sums over the inputs of every output unit, in a network trained by the package."""
    task = replace(tasks.get("digits"), model=FunctionalModel(small_cnn()))
    axes = projected_axes(task.model.layout)
    decay, rate, rounds = 0.01, 0.05, min(size.rounds, 6)
    variants: dict[str, dict[str, Any]] = {
        "plain": {"client_decay": 0.0},
        "decayed": {"client_decay": decay},
        "unprojected": {"client_decay": 0.0, "client_project": "none"},
    }
    before = _sums(_start(task), axes)
    after = {
        name: _sums(_train(task, rounds, client_lr=rate, **options), axes)
        for name, options in variants.items()
    }
    # Fifty images, two epochs, batches of ten: ten steps per client and round.
    factor = (1.0 - decay * rate) ** (10 * rounds)
    shrunk = {name: factor * column for name, column in before.items()}
    return Finding(
        "T11",
        "Column sums in a network",
        "without decay every kernel's sums over its inputs stay as they were initialised",
        f"digits, small CNN with {len(before)} kernels, this package's fedzmg in float64, "
        f"momentum 0.9, {rounds} rounds of 5 clients",
        (
            Value("change of a column sum, largest", 0.0, _farthest(after["plain"], before), 1e-12,
                  stated=True),
            Value(f"lambda = {decay}: off prod (1 - lambda lr), largest", 0.0,
                  _farthest(after["decayed"], shrunk), 1e-12),
            Value("without projection: largest change, at least", 1e-3,
                  _farthest(after["unprojected"], before), 0.0, "at least"),
        ),
    )  # fmt: skip


def _farthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _start(task: Task) -> Tree:
    return initial_params(task.model, task.init, 0).map(lambda leaf: leaf.to(REAL))


def _train(
    task: Task, rounds: int, receive: Callable[[Tree], None] | None = None, **options: Any
) -> Tree:
    """Train FedZMG in double precision; ``receive`` gets the model after every round."""

    def observe(report: RoundReport) -> None:
        if receive is not None:
            receive(report.simulation.checkpoint(0).params())

    # Evaluations are not used: one suffices.
    quiet = replace(task, protocol=replace(task.protocol, eval_every=rounds))
    [history] = simulate(
        quiet, [Trial.of("fedzmg", **options)], rounds=rounds, device="cpu", dtype=REAL,
        engine="vectorized", observer=observe,
    )  # fmt: skip
    return history.params


def _sums(params: Tree, axes: Axes) -> dict[str, Tensor]:
    return {name: leaf.sum(axes[name]) for name, leaf in params.items() if axes[name]}


def mean_energy(size: Size) -> Finding:
    """T12: the share of a gradient's square that is its mean over the inputs."""
    width, examples = 512, max(256, size.samples // 200)
    generator = seeded(12)
    gauss = normal(generator, examples, width)
    inputs = {
        "centred Gaussian, 1/d": (gauss, 1.0 / width),
        "after a ReLU, 1/pi": (gauss.clamp(min=0.0), 1.0 / math.pi),
        "uniform on [0, 1], 3/4": (
            torch.rand(examples, width, generator=generator, dtype=REAL), 0.75,
        ),
    }  # fmt: skip
    lines, identity = [], 0.0
    for name, (x, predicted) in inputs.items():
        removed = removed_shares(x, generator)
        # Five standard errors; finite width adds an error of about 1/width.
        tolerance = 5.0 * (2.0 / examples) ** 0.5 / width if predicted < 0.01 else 4.0 / width
        lines.append(Value(name, predicted, float(removed.mean()), tolerance))
        formula = x.mean(-1) ** 2 / (x**2).mean(-1)
        identity = max(identity, float((removed - formula).abs().max()))
    task = tasks.get("digits")
    pixels = task.prepare(task.train.examples.x[:examples], REAL).flatten(1)
    removed = removed_shares(pixels, generator)
    formula = pixels.mean(-1) ** 2 / (pixels**2).mean(-1)
    identity = max(identity, float((removed - formula).abs().max()))
    lines.append(
        Value("digits, white background, from their pixels", float(formula.mean()),
              float(removed.mean()), 1e-9)
    )  # fmt: skip
    centred = removed_shares(pixels - pixels.mean(-1, keepdim=True), generator)
    lines.append(Value("digits, each image centred", 0.0, float(centred.mean()), 1e-12))
    lines.insert(
        0,
        Value("removed share - mean(x)^2 / mean(x^2), largest", 0.0, identity, 1e-12, stated=True),
    )
    series = _along_training(size)
    first = min(y[0] for name, (_, y) in series.items() if name.startswith("layer 1"))
    lines.append(
        Value("first convolution of the CNN, at least half at the start", 0.5, first, 0.0,
              "at least")
    )  # fmt: skip
    return Finding(
        "T12",
        "Energy of the mean component",
        "of a dense layer's gradient, projection removes mean(x)^2 / mean(x^2) of every example",
        f"dense layer of {width} inputs, {examples:,} examples; digits; then the digits CNN along "
        f"{size.rounds} rounds",
        tuple(lines),
        series=series,
    )


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
    left = zero_mean(gradients, (-1,))
    return 1.0 - (left**2).sum((1, 2)) / (gradients**2).sum((1, 2))


def _along_training(size: Size) -> Series:
    """Measure the mean share by layer after every round of FedZMG on digits."""
    task = tasks.get("digits")
    model = task.model.to(torch.device("cpu"), REAL)
    axes = projected_axes(task.model.layout)
    ends, count = task.train.offsets, min(8, 2 * size.rounds)
    watched = [
        Examples(task.train.examples.x[a:b], task.train.examples.y[a:b])
        for a, b in zip(ends[:count].tolist(), ends[1 : count + 1].tolist(), strict=True)
    ]
    found: dict[str, list[float]] = {name: [] for name, over in axes.items() if over}

    def measure(params: Tree) -> None:
        total = dict.fromkeys(found, 0.0)
        for own in watched:
            weights = {k: v.to(REAL).detach().requires_grad_() for k, v in params.items()}
            outputs = model.evaluate(Tree(weights), task.prepare(own.x.clone(), REAL))
            leaves = torch.autograd.grad(task.loss(outputs, own.y).mean(), list(weights.values()))
            for (name, over), leaf in zip(axes.items(), leaves, strict=True):
                if over:
                    left = zero_mean(leaf, over)
                    total[name] += 1.0 - float((left**2).sum() / (leaf**2).sum())
        for name in found:
            found[name].append(total[name] / len(watched))

    measure(_start(task))
    _train(task, size.rounds, measure, client_lr=0.03)
    x = [float(r) for r in range(size.rounds + 1)]
    kinds = {"Conv2d": "convolution", "Linear": "dense"}
    return {
        f"layer {i + 1}, {kinds.get(task.model.layout[name].layer, 'layer')}": (x, shares)
        for i, (name, shares) in enumerate(found.items())
    }
