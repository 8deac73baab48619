"""Test the verdict of ``fedzmg diagnose`` by training with and without the projection.

    python tools/validate_diagnose.py

Every task gets its verdict first, at the initial model. Then two arms are trained that differ in
the projection only: momentum 0.9, decay 0.0005, the same seeds, cohorts and batches. Each arm
chooses its client learning rate from the same grid, on a tuning seed and the tuning examples. Four
other seeds judge it on other examples, by the mean over the evaluations of the last third of the
rounds.

The definition of a gain was fixed before any of these tasks ran. A gain or a loss in accuracy is at
least one point and two standard errors of the paired difference; anything else is little. For other
metrics the threshold is five per cent of the test loss. A first pass had best rates on the edges of
its grids. The grids were then widened and the text tasks trained longer; no outcome changed.

The numbers of the rule come from the tasks of ``--development``, which do not count in the hit
rate; all outcomes were known when it was chosen. Finished tasks are kept; the same command
continues, and judges tasks of an older rule again without training them. Tasks on real data need
$FEDZMG_DATA and are skipped without it. Learning rates added to a grid are tried without repeating
others.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from fedzmg import tasks
from fedzmg.data.embedded import load_digits
from fedzmg.data.federated import Examples, FederatedData, examples
from fedzmg.data.partition import dirichlet
from fedzmg.diagnose import Progress, diagnose
from fedzmg.diagnose.diagnosis import centred, excerpt
from fedzmg.errors import InputError
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.networks import CharGRU, digits_cnn, mlp
from fedzmg.provenance import provenance
from fedzmg.simulation import Trial, simulate
from fedzmg.storage.files import write_atomic
from fedzmg.tasks import Task

TUNING, REPORTED = (1000,), (0, 1, 2, 3)
RATES = (0.0003162, 0.001, 0.003162, 0.01, 0.03162, 0.1, 0.3162)
POINT, RELATIVE, ERRORS = 0.01, 0.05, 2.0
SHARE = "first layer's mean share"
ARMS = {"without": "none", "with": "all"}


@dataclass(frozen=True)
class Case:
    """Task to judge and train."""

    build: Callable[[], Task]
    rounds: int
    rates: Sequence[float] = RATES
    protocol: Mapping[str, Any] = field(default_factory=dict)


def with_centred_inputs(task: Task) -> Task:
    """Subtract each example's own mean."""
    made = centred(task)
    assert made is not None
    return made


def inverted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert bytes to ink 1.0 and background 0.0."""
    return 1 - x.to(dtype) / 255


def digits(**changes: Any) -> Task:
    """Build the embedded digits with some parts replaced."""
    return replace(tasks.get("digits"), **changes)


def clusters(shift: float, own: float, model: nn.Module, *, truth: str = "clusters") -> Task:
    """Draw Gaussian clusters whose labels are skewed over clients by Dirichlet(0.1).

    All inputs are shifted by ``shift`` and those of a client by ``own`` on average; with
    ``truth="sum"`` a class is a range of the sum of the inputs.
    """
    rng = np.random.default_rng(11)
    y = rng.integers(0, CLASSES, 9000)
    x = rng.normal(size=(9000, INPUTS)) + 0.6 * rng.normal(size=(CLASSES, INPUTS))[y]
    if truth == "sum":
        y = np.argsort(np.argsort(x.sum(1))) * CLASSES // len(x)
    owner = np.full(len(y), 0)
    owner[:6000] = dirichlet(y[:6000], 60, alpha=0.1, seed=0)
    x = (x + shift + own * rng.normal(size=60)[owner][:, None]).astype(np.float32)
    task = Task.from_arrays(
        model, x[:6000], y[:6000], owner[:6000], test=(x[7500:], y[7500:]),
        cohort=6, batch_size=10, epochs=1,
    )  # fmt: skip
    return replace(task, tune=examples(x[6000:7500], y[6000:7500]))


def brightened(spread: float) -> Task:
    """Build digits whose brightness differs from client to client; test images have their own."""
    data, rng = load_digits(), np.random.default_rng(3)
    owners = dirichlet(data.train_y, 160, alpha=0.1, seed=0)
    train = (data.train_x / 255 + spread * rng.normal(size=160)[owners][:, None, None]).astype("f4")
    shift = spread * rng.normal(size=len(data.test_y))[:, None, None]
    test = (data.test_x / 255 + shift).astype("f4")
    return digits(
        name="digits-brightened",
        train=FederatedData.from_arrays(train, data.train_y, owners),
        tune=examples(test[0::2], data.test_y[0::2]),
        test=examples(test[1::2], data.test_y[1::2]),
        prepare=lambda x, dtype: x.to(dtype),
    )


def some(task: Task, clients: int, most: int, model: nn.Module, held_out: int = 1500) -> Task:
    """Slice a task: some clients, some of their examples, a smaller model."""
    _, part = excerpt(task, clients, most, 0)
    tune, test = (
        Examples(*(column[:held_out] for column in kept))
        for kept in (task.tune or task.test, task.test)
    )
    return replace(
        part, model=FunctionalModel(model), tune=tune, test=test, options={}, protocol=task.protocol
    )


def few_classes(task: Task, classes: int, model: nn.Module) -> Task:
    """Keep the first classes, dealt to clients of 100 by Dirichlet(0.3)."""
    x, y = task.train.examples
    x, y = x[y < classes], y[y < classes]
    owners = dirichlet(y.numpy(), len(y) // 100, alpha=0.3, seed=0)
    kept = {
        name: Examples(part.x[part.y < classes], part.y[part.y < classes])
        for name, part in (("tune", task.tune), ("test", task.test))
        if part is not None
    }
    train = FederatedData.from_arrays(x, y, owners)
    return replace(
        task, model=FunctionalModel(model), train=train, options={}, test_owners=None, **kept
    )


def colour_cnn(outputs: int) -> nn.Sequential:
    """Build two strided convolutions and two dense layers for 3 x 32 x 32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 64, 48), nn.ReLU(), nn.Linear(48, outputs),
    )  # fmt: skip


IMAGES: dict[str, Any] = {"cohort": 5, "batch_size": 10, "epochs": 2, "straddle": False}
TEXT: dict[str, Any] = {"cohort": 5, "batch_size": 8, "epochs": 4, "keep_partial": True}
FAST = (0.1, 0.3162, 1.0, 3.162)
INPUTS, CLASSES = 32, 8

DEVELOPMENT = {
    "network": Case(lambda: clusters(0.0, 0.0, mlp(INPUTS, 48, outputs=CLASSES)), 20),
    "network, shift 1": Case(lambda: clusters(1.0, 0.0, mlp(INPUTS, 48, outputs=CLASSES)), 20),
    "network, shift 3": Case(lambda: clusters(3.0, 0.0, mlp(INPUTS, 48, outputs=CLASSES)), 20),
    "network, own shift 1": Case(lambda: clusters(0.0, 1.0, mlp(INPUTS, 48, outputs=CLASSES)), 20),
    "network, own shift 3": Case(lambda: clusters(0.0, 3.0, mlp(INPUTS, 48, outputs=CLASSES)), 20),
    "network, sums": Case(
        lambda: clusters(0.0, 0.0, mlp(INPUTS, 48, outputs=CLASSES), truth="sum"), 20
    ),
    "linear": Case(lambda: clusters(0.0, 0.0, mlp(INPUTS, outputs=CLASSES)), 20),
    "linear, shift 3": Case(lambda: clusters(3.0, 0.0, mlp(INPUTS, outputs=CLASSES)), 20),
    "linear, no bias, shift 1": Case(
        lambda: clusters(1.0, 0.0, nn.Linear(INPUTS, CLASSES, bias=False)), 20
    ),
    "linear, sums": Case(lambda: clusters(0.0, 0.0, mlp(INPUTS, outputs=CLASSES), truth="sum"), 20),
}

VALIDATION = {
    "digits": Case(digits, 20),
    "digits, centred": Case(lambda: with_centred_inputs(digits()), 20),
    "digits, ink 1": Case(lambda: digits(prepare=inverted), 20),
    "digits, brightened": Case(lambda: brightened(0.3), 20),
    "digits, brightened, centred": Case(lambda: with_centred_inputs(brightened(0.3)), 20),
    "digits, logistic regression": Case(
        lambda: digits(model=FunctionalModel(mlp(784, outputs=10))), 30
    ),
    "digits, dense network": Case(
        lambda: digits(model=FunctionalModel(mlp(784, 32, outputs=10))), 30
    ),
    "plays": Case(
        lambda: some(tasks.get("plays"), 150, 24, CharGRU(66, 16, 32), 400), 20, FAST, TEXT
    ),
    "quadratic": Case(lambda: tasks.get("quadratic"), 60),
    "quadratic, zero-sum start": Case(
        lambda: tasks.get("quadratic", {"start": "zero_sum"}), 60
    ),
    "logistic": Case(lambda: tasks.get("logistic"), 60),
    "logistic, zero-sum start": Case(lambda: tasks.get("logistic", {"start": "zero_sum"}), 60),
    "mnist-by-writer": Case(
        lambda: some(tasks.get("mnist-by-writer"), 120, 50, digits_cnn(62)), 20, protocol=IMAGES
    ),
    "mnist-by-writer, centred": Case(
        lambda: some(
            tasks.get("mnist-by-writer", {"centring": "image"}), 120, 50, digits_cnn(62)
        ),
        20, protocol=IMAGES,
    ),
    "chars74k": Case(
        lambda: some(tasks.get("chars74k"), 55, 62, digits_cnn(62)), 20, protocol=IMAGES
    ),
    "cifar100, 10 classes": Case(
        lambda: few_classes(tasks.get("cifar100"), 10, colour_cnn(10)), 16,
        protocol={**IMAGES, "epochs": 1},
    ),
    "cifar100, 10 classes, centred": Case(
        lambda: few_classes(tasks.get("cifar100", {"centring": "image"}), 10, colour_cnn(10)), 16,
        protocol={**IMAGES, "epochs": 1},
    ),
    "shakespeare-by-role": Case(
        lambda: some(
            tasks.get("shakespeare-by-role", {"length": 40}), 150, 24, CharGRU(66, 16, 32), 400
        ),
        20, FAST, TEXT,
    ),
}  # fmt: skip


def scores(task: Task, arm: str, rates: Sequence[float], seeds: Sequence[int]) -> np.ndarray:
    """Return ``[rates, seeds]`` of accuracy or minus the test loss, worst for a diverged run."""
    rounds, accuracy = task.protocol.rounds, task.metric.name == "accuracy"
    trials = [
        Trial.of("fedzmg", seed, client_lr=rate, client_project=ARMS[arm])
        for rate in rates
        for seed in seeds
    ]
    found = []
    for history in simulate(task, trials, device="cpu", engine="vectorized"):
        kept = [r for r in history.records if r.metric is not None and 3 * r.round > 2 * rounds]
        values = [r.metric if accuracy else -float(r.loss or np.inf) for r in kept]
        bad = history.diverged is not None or not np.isfinite(values).all()
        found.append((0.0 if accuracy else -np.inf) if bad else float(np.mean(values)))
    return np.reshape(found, (len(rates), len(seeds)))


def outcome(differences: np.ndarray, scale: float) -> str:
    """Classify paired differences as gain, loss or little, relative to ``scale``."""
    mean = float(differences.mean())
    error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
    if abs(mean) < scale or abs(mean) < ERRORS * error:
        return "little"
    return "gain" if mean > 0 else "loss"


def validate(case: Case, known: Mapping[str, Any]) -> dict[str, Any]:
    """Judge a task and train both arms, without repeating learning rates."""
    began = time.process_time()
    task = case.build()
    every = max(1, case.rounds // 10)
    wanted = {**case.protocol, "rounds": case.rounds, "eval_every": every}
    task = replace(task, protocol=task.protocol.with_options(wanted))
    found = diagnose(task, device="cpu", drifting=0)
    measured = found.points[0]
    tuning = replace(task, test=task.tune or task.test)
    arms: dict[str, Any] = {}
    for arm in ARMS:
        before = known.get("arms", {}).get(arm, {})
        tried = {float(rate): score for rate, score in before.get("tuning", {}).items()}
        if missing := [rate for rate in case.rates if rate not in tried]:
            fresh = scores(tuning, arm, missing, TUNING).mean(1)
            tried |= {rate: round(float(s), 5) for rate, s in zip(missing, fresh, strict=True)}
        tried = {rate: tried[rate] for rate in case.rates}
        rate = max(tried, key=lambda rate: tried[rate])
        reported = before["reported"] if rate == before.get("rate") else [
            round(float(s), 5) for s in scores(task, arm, [rate], REPORTED)[0]
        ]  # fmt: skip
        arms[arm] = {
            "rate": rate,
            "edge": rate in (case.rates[0], case.rates[-1]),
            "tuning": tried,
            "reported": reported,
        }
    with_, without = (np.array(arms[arm]["reported"]) for arm in ("with", "without"))
    accuracy = task.metric.name == "accuracy"
    scale = POINT if accuracy else RELATIVE * abs(float(without.mean()))
    actual = outcome(with_ - without, scale)
    return {
        "expected": found.verdict.expect,
        "actual": actual,
        "hit": found.verdict.expect == actual,
        "judged by": "accuracy" if accuracy else "minus the test loss",
        "difference": round(float((with_ - without).mean()), 5),
        "standard error": round(float((with_ - without).std(ddof=1) / len(with_) ** 0.5), 5),
        SHARE: measured.layers[0].share.mean,
        "first layer's diversity": asdict(measured.layers[0].diversity),
        "whole mean share": measured.whole.share.mean,
        "forbidden": measured.whole.forbidden,
        "lost": measured.whole.lost,
        "progress": None if found.progress is None else asdict(found.progress),
        "verdict": found.verdict.summary,
        "arms": arms,
        "rounds": case.rounds,
        "made by": {**provenance(), "command": shlex.join(["python", *sys.argv])},
        "cpu seconds": round(known.get("cpu seconds", 0.0) + time.process_time() - began, 1),
    }


def complete(known: Mapping[str, Any], case: Case) -> bool:
    """Return True if a case was judged by this rule, with all of its learning rates."""
    arms = known.get("arms", {})
    return (
        len(arms) == len(ARMS)
        and "progress" in known
        and all(
            [float(rate) for rate in arm["tuning"]] == list(case.rates) for arm in arms.values()
        )
    )


def summary(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Count hits over all tasks, and those of three constant answers."""
    done = [one for one in kept.values() if "hit" in one]
    constant = {word: sum(o["actual"] == word for o in done) for word in ("gain", "little", "loss")}
    return {"tasks": len(done), "hits": sum(o["hit"] for o in done), "always saying": constant}


def markdown(kept: Mapping[str, Any]) -> str:
    """Format the kept cases as a Markdown table."""
    lines = [
        "| task | loss before | after, without | with | ratio | expected "
        "| score, without → with | outcome | | mean, first layer |",
        "|---|--:|--:|--:|--:|---|--:|---|---|--:|",
    ]
    for name, one in kept.items():
        if "skipped" in one:
            continue
        tried = Progress(**one["progress"])
        falls = " | ".join(f"{loss:.3g}" for loss in (tried.start, *tried.losses))
        share = one[SHARE]
        unit = 100 if one["judged by"] == "accuracy" else 1
        arms = one["arms"]
        scores_ = [np.mean(arms[arm]["reported"]) * unit for arm in ("without", "with")]
        lines.append(
            f"| {name} | {falls} | {tried.ratio or 0:.2f} | {one['expected']} "
            f"| {scores_[0]:.3g} → {scores_[1]:.3g} ({unit * one['difference']:+.2g} ± "
            f"{unit * one['standard error']:.1g}) | {one['actual']} "
            f"| {'hit' if one['hit'] else '**miss**'} | {100 * share:.0f} % |"
        )
    return "\n".join(lines)


def ranks(kept: Mapping[str, Any]) -> str:
    """Correlate the ranks of the measures with those of the gains in accuracy."""
    known = [one for one in kept.values() if one.get("judged by") == "accuracy"]
    ratios = [Progress(**one["progress"]).ratio for one in known]
    gains, shares = ([one[key] for one in known] for key in ("difference", SHARE))
    found = [float(spearmanr(values, gains).statistic) for values in (ratios, shares)]
    return f"ranks of {len(known)} tasks: ratio {found[0]:.2f}, first layer {found[1]:.2f}"


def main() -> None:
    """Validate what is not kept yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--development", action="store_true", help="tasks outside the hit rate")
    parser.add_argument("--only", nargs="+", help="names of tasks")
    parser.add_argument("--table", action="store_true", help="print what is kept in Markdown")
    parser.add_argument("--out", type=Path, default=Path("results/diagnose"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group = DEVELOPMENT if arguments.development else VALIDATION
    path = arguments.out / ("development.json" if arguments.development else "validation.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text())["cases"] if path.exists() else {}
    if arguments.table:
        other = "validation.json" if arguments.development else "development.json"
        more = json.loads(path.with_name(other).read_text())["cases"]
        print(markdown(kept), "", ranks(kept), ranks(kept | more), sep="\n")
        return
    for name, case in group.items():
        if complete(kept.get(name, {}), case) or name not in (arguments.only or group):
            continue
        try:
            kept[name] = validate(case, kept.get(name, {}))
        except InputError as error:
            kept[name] = {"skipped": str(error)}
        ordered = {known: kept[known] for known in group if known in kept}
        data = {"summary": summary(ordered), "cases": ordered}
        write_atomic(path, (json.dumps(data, indent=1) + "\n").encode())
        one = kept[name]
        print(
            f"{name}: skipped" if "skipped" in one else
            f"{name}: expected {one['expected']}, outcome {one['actual']} "
            f"({one['difference']:+.4f} ± {one['standard error']:.4f}), "
            f"{one['cpu seconds']:.0f} s",
            flush=True,
        )  # fmt: skip
    print(json.dumps(summary(kept)))


if __name__ == "__main__":
    main()
