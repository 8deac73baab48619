"""Measure curvature and client drift along training, with the projection and without.

    python tools/sharpness.py digits --rounds 50 --every 10
    python tools/sharpness.py cifar100 --rounds 500 --every 50 --device cuda
    python tools/sharpness.py cifar100 --table      # what is kept; no training

FedZMG trains with all weights projected and with none, at the same client learning rate, momentum
and decay, with the seeds 20 to 22. After some rounds three numbers are taken from each arm's own
model:

* the largest eigenvalue of the Hessian of the training loss, dropout off, on examples of many
  clients, by power iteration; also within the subspace in which the projection lets weights move;
* the drift of clients: the mean squared distance of the models that they train locally, by the
  arm's own rule, from their mean, over the squared length of the mean update;
* the squared length of the mean update.

Rules, fixed before CIFAR-100 was measured: the projection leads to flatter models, or to less
drift, if the number is smaller with it than without for all three seeds in at least three quarters
of the measured rounds after the first; to sharper models, or more drift, if it is larger in as
many.

Writes results/TASK-sharpness.json after every measurement, with four digits; what the file has
already with the same options is not measured again. ``--lr`` is 10^-2 by default, as in
experiments/cifar100-mechanism-study.toml.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedzmg import algorithms, tasks
from fedzmg.diagnose.diagnosis import excerpt, updates
from fedzmg.errors import InputError
from fedzmg.kernels import rounding
from fedzmg.models.objective import Batch, Objective
from fedzmg.provenance import environment
from fedzmg.seeds import stream
from fedzmg.simulation import RoundReport, Trial, resolve_device, simulate
from fedzmg.storage.files import write_atomic
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, row
from fedzmg.wrappers.projection import Axes, projected_axes, zero_mean

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 20, 21, 22
ARMS = {"with": "all", "without": "none"}
Numbers = dict[str, dict[str, dict[str, float]]]
"""Measured numbers of an arm, by seed, round and name."""
MOST_STEPS, CLOSE = 40, 0.005  # of the power iteration: steps, and relative change to stop at
ENOUGH = 0.75


def top_eigenvalue(
    objective: Objective, params: Tree, examples: Batch, axes: Axes | None = None
) -> float:
    """Compute the largest eigenvalue of the loss's Hessian, within the subspace of ``axes``."""
    leaves = params.map(lambda leaf: leaf.detach().requires_grad_())
    inside = axes or {}

    def projected(vector: list[Tensor]) -> list[Tensor]:
        both = zip(leaves, vector, strict=True)
        return [zero_mean(part, inside.get(name, ())) for name, part in both]

    known = list(leaves.values())
    slopes = torch.autograd.grad(objective.eval_loss(leaves, examples), known, create_graph=True)

    def times_hessian(vector: list[Tensor]) -> list[Tensor]:
        along = torch.stack([(s * v).sum() for s, v in zip(slopes, vector, strict=True)]).sum()
        found = torch.autograd.grad(along, known, allow_unused=True, retain_graph=True)
        return [p if f is None else f for f, p in zip(found, params.zeros().values(), strict=True)]

    generator = torch.Generator().manual_seed(0)
    vector = [torch.randn(p.shape, generator=generator).to(p) for p in leaves.values()]
    vector, value = projected(vector), float("nan")
    for _ in range(MOST_STEPS):
        length = torch.stack([part.square().sum() for part in vector]).sum().sqrt()
        vector = [part / length for part in vector]
        after = projected(times_hessian(vector))
        dots = [(a * b).sum() for a, b in zip(after, vector, strict=True)]
        before, value = value, float(torch.stack(dots).sum())
        if abs(value - before) <= CLOSE * abs(value):
            break
        vector = after
    return value


def drift(task: Task, params: Tree, rule: Any, clients: int, seed: int) -> tuple[float, float]:
    """Return the clients' mean squared distance over that of their mean update, and the latter."""
    chosen = np.sort(stream(seed, "probe", "diagnose", "drift").permutation(len(task.train)))
    own = [part for part, _ in updates(task, params, chosen[:clients], rule, seed)]
    rows = torch.cat([torch.cat([p.flatten(1) for p in part.values()], 1) for part in own])
    mean = rows.double().mean(0)
    length = float(mean.square().sum())
    spread = float((rows.double() - mean).square().sum(1).mean())
    return spread / length, length


def measure(
    arguments: argparse.Namespace, task: Task, arm: str, found: Numbers, save: Callable[[], object]
) -> None:
    """Train one arm under all seeds, and measure what is not found yet, by seed and round."""
    last = str(arguments.rounds - arguments.rounds % arguments.every)
    if all(last in found[str(seed)] for seed in SEEDS):
        return
    device = resolve_device(arguments.device)
    options = {"client.lr": arguments.lr, "client.project": ARMS[arm], "server.lr": 1.0}
    algorithm = algorithms.get("fedzmg").with_options(options)
    _, part = excerpt(task, arguments.clients, arguments.examples, 0)
    x, y = part.train.examples
    x, y = part.prepare(x, torch.float32).to(device), y.to(device)
    pieces = Batch(x, y, torch.full((len(y),), 1 / len(y), device=device), ())
    objective = replace(task.objective, model=task.model.to(device, torch.float32))
    axes = projected_axes(task.model.layout)

    def observe(report: RoundReport) -> None:
        if report.round % arguments.every and report.round != 1:
            return
        for i, seed in enumerate(SEEDS):
            if str(report.round) in found[str(seed)]:
                continue
            params = row(report.simulation.snapshot.params, i).map(torch.clone)
            with rounding("float32"), torch.enable_grad():
                ways = (
                    top_eigenvalue(objective, params, pieces),
                    top_eigenvalue(objective, params, pieces, axes),
                )
            moved = drift(task, params, algorithm.client, arguments.drifting, report.round)
            names = "eigenvalue", "eigenvalue within", "drift", "mean update squared"
            values = {n: float(f"{v:.4g}") for n, v in zip(names, (*ways, *moved), strict=True)}
            found[str(seed)][str(report.round)] = values
            save()
            shown = ", ".join(f"{name} {value}" for name, value in values.items())
            print(f"{arm} projection, seed {seed}, round {report.round}: {shown}", flush=True)

    quiet = replace(task, protocol=replace(task.protocol, eval_every=arguments.every))
    trials = [Trial(algorithm, seed) for seed in SEEDS]
    simulate(quiet, trials, rounds=arguments.rounds, device=arguments.device, observer=observe)


def verdict(found: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Apply the rule to a number."""
    with_, without = found["with"], found["without"]
    rounds = [r for r in with_[str(SEEDS[0])] if r != "1"]
    less = more = 0
    for round_ in rounds:
        both = [(with_[str(s)][round_][name], without[str(s)][round_][name]) for s in SEEDS]
        less += all(a < b for a, b in both)
        more += all(a > b for a, b in both)
    most = ENOUGH * len(rounds)
    word = "smaller" if less >= most else "larger" if more >= most else "no clear difference"
    return f"{word} (smaller in {less}, larger in {more} of {len(rounds)} rounds for all seeds)"


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print verdicts and ranges of kept numbers, after the first round."""

    def each(arm: str, name: str) -> list[float]:
        rounds = [r for r in found[arm][str(SEEDS[0])] if r != "1"]
        return [found[arm][str(seed)][r][name] for r in rounds for seed in SEEDS]

    def spread(values: Sequence[float]) -> str:
        return f"{min(values):.3g} to {max(values):.3g}"

    for name in found["with"][str(SEEDS[0])]["1"]:
        with_, without = each("with", name), each("without", name)
        ratios = [a / b for a, b in zip(with_, without, strict=True)]
        first, later = ratios[: len(SEEDS)], ratios[len(SEEDS) :]
        print(f"with the projection, {name}: {verdict(found, name)}")
        print(f"  {spread(with_)}, without {spread(without)}")
        print(f"  with over without: first {spread(first)}, later {spread(later)}")
    for arm in ARMS:
        both = zip(each(arm, "eigenvalue within"), each(arm, "eigenvalue"), strict=True)
        shares = [inside / whole for inside, whole in both]
        middle = float(np.median(shares))
        print(f"{arm}: eigenvalue within over whole {spread(shares)}, median {middle:.2f}")


def main() -> None:
    """Measure both arms, print the verdicts and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(tasks.TASKS))
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clients", type=int, default=40, help="whose examples make the loss")
    parser.add_argument("--examples", type=int, default=50, help="of each of them, at most")
    parser.add_argument("--drifting", type=int, default=20, help="clients that train locally")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--table", action="store_true", help="print what is kept")
    arguments = parser.parse_args()
    path = ROOT / "results" / f"{arguments.task}-sharpness.json"
    if arguments.table:
        show(json.loads(path.read_text()))
        return
    del arguments.table
    if min(arguments.rounds, arguments.every, arguments.clients, arguments.drifting - 1) < 1:
        parser.error("rounds, every and clients must be at least 1, drifting at least 2")
    try:
        task = tasks.get(arguments.task)
    except InputError as error:
        parser.error(str(error))
    old = json.loads(path.read_text()) if path.is_file() else None
    if old is None or old["environment"]["options"] != vars(arguments):
        old = {arm: {str(seed): {} for seed in SEEDS} for arm in ARMS}
    found: dict[str, Numbers] = {arm: old[arm] for arm in ARMS}
    command = shlex.join(["python", *sys.argv])
    machine = environment(resolve_device(arguments.device))
    facts = {**machine, "command": command, "options": vars(arguments)}
    verdicts: dict[str, str] = {}

    def save() -> None:
        kept = {"environment": facts, "verdicts": verdicts, **found}
        write_atomic(path, (json.dumps(kept, indent=1) + "\n").encode())

    for arm in ARMS:
        measure(arguments, task, arm, found[arm], save)
    for name in found["with"][str(SEEDS[0])]["1"]:
        verdicts[name] = verdict(found, name)
        print(f"with the projection, {name}: {verdicts[name]}")
    save()


if __name__ == "__main__":
    main()
