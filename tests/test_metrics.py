"""Ready-made losses and metrics against plain formulas, pooled and by client, on every path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor, nn
from torch.nn import functional as F

from fedzmg import InputError, Metric, Task, Trial
from fedzmg.metrics import METRICS, loss_and_metric
from fedzmg.models.objective import LOSSES
from fedzmg.simulation import Simulation
from golden_problems import Net

RNG = np.random.default_rng(0)
N, WHO = 40, np.arange(40) % 5
OF = {int(who): np.flatnonzero(who == WHO) for who in np.unique(WHO)}


def ignore(targets: Any, share: float = 0.2) -> Any:
    """Make some targets padding, but not the first of an example."""
    gone = RNG.random(targets.shape) < share
    if targets.ndim > 1:
        gone[:, 0] = False
    return np.where(gone, -100, targets)


def sequence(classes: int = 5) -> nn.Module:
    return Net(lambda m, x: m.head(m.embed(x)), embed=nn.Embedding(6, 4),
               head=nn.Linear(4, classes))  # fmt: skip


X, TOKENS = RNG.normal(size=(N, 6)), RNG.integers(0, 6, (N, 7))
TASKS: dict[str, tuple[Any, Any, Any, str]] = {
    "classes": (lambda: nn.Linear(6, 7), X, RNG.integers(0, 7, N), "cross_entropy"),
    "two": (lambda: nn.Linear(6, 2), X, RNG.integers(0, 2, N), "cross_entropy"),
    "binary": (lambda: nn.Linear(6, 1), X, RNG.integers(0, 2, N), "binary_cross_entropy"),
    "many": (lambda: nn.Linear(6, 3), X, ignore(RNG.integers(0, 2, (N, 3))),
             "binary_cross_entropy"),
    "tokens": (sequence, TOKENS, ignore(RNG.integers(0, 5, (N, 7))), "masked_cross_entropy"),
    "next": (lambda: sequence(6), TOKENS, ignore(TOKENS), "next_token_cross_entropy"),
    "pixels": (lambda: nn.Conv2d(2, 3, 1), RNG.normal(size=(N, 2, 3, 3)),
               ignore(RNG.integers(0, 3, (N, 3, 3))), "pixel_cross_entropy"),
    "mask": (lambda: nn.Conv2d(2, 1, 1), RNG.normal(size=(N, 2, 3, 3)),
             RNG.integers(0, 2, (N, 3, 3)), "binary_cross_entropy"),
    "numbers": (lambda: nn.Linear(6, 1), X, X.sum(1), "squared_error"),
    "vectors": (lambda: nn.Linear(6, 2), X, X[:, :2], "absolute_error"),
}  # fmt: skip


def reference_loss(kind: str, out: Tensor, y: Tensor) -> list[float]:
    """Torch's own loss, one example at a time."""
    found = []
    for o, t in zip(out, y, strict=True):
        valid = t >= 0
        if TASKS[kind][3] == "binary_cross_entropy":
            o, t, valid = o.reshape(-1), t.reshape(-1).to(o.dtype), valid.reshape(-1)
            loss = F.binary_cross_entropy_with_logits(o[valid], t[valid])
        elif kind == "numbers":
            loss = F.mse_loss(o.squeeze(), t)
        elif kind == "vectors":
            loss = F.l1_loss(o, t)
        else:
            o, t = (o[:-1], t[1:]) if kind == "next" else (o, t)
            o = o.permute(1, 2, 0) if kind == "pixels" else o
            loss = F.cross_entropy(o.reshape(-1, o.shape[-1]), t.reshape(-1), ignore_index=-100)
        found.append(float(loss.nan_to_num()))
    return found


def flat(kind: str, out: Tensor, y: Tensor) -> tuple[Any, Any]:
    """Scores as rows of positions x classes, and labels, without padding."""
    o, t = (out[:, :-1], y[:, 1:]) if kind == "next" else (out, y)
    o = o.movedim(1, -1) if o.ndim > 3 else o
    if TASKS[kind][3] == "binary_cross_entropy":
        t = t.reshape(o.shape)
        return o.reshape(-1, o.shape[-1]).numpy(), t.reshape(-1, o.shape[-1]).numpy()
    o, t = o.reshape(-1, o.shape[-1]).numpy(), t.reshape(-1).numpy()
    return o[t >= 0], t[t >= 0]


def counts_of(kind: str, o: Any, t: Any) -> list[tuple[int, int, int]]:
    """True positives, false positives and false negatives of each class that occurs."""
    found = []
    for c in range(o.shape[1]):
        if t.ndim == 2:
            real = t[:, c] >= 0
            said, is_ = o[real, c] > 0, t[real, c] == 1
        else:
            said, is_ = o.argmax(1) == c, t == c
        found.append((int((said & is_).sum()), int((said & ~is_).sum()), int((~said & is_).sum())))
    return found


def area(score: Any, label: Any) -> float | None:
    positive, negative = score[label == 1], score[label == 0]
    if not len(positive) or not len(negative):
        return None
    return float(mannwhitneyu(positive, negative).statistic) / len(positive) / len(negative)


def reference(metric: str, kind: str, out: Tensor, y: Tensor) -> float:
    """The metric by the book, from all outputs."""
    o, t = flat(kind, out, y) if kind not in ("numbers", "vectors") else (out.numpy(), y.numpy())
    if metric in ("mse", "rmse", "mae"):
        off = o.reshape(t.shape) - t
        mean = np.abs(off).mean() if metric == "mae" else (off**2).mean()
        return float(np.sqrt(mean) if metric == "rmse" else mean)
    if metric in ("f1", "dice", "iou", "f1_micro"):
        cases = counts_of(kind, o, t)
        if metric == "f1_micro":
            cases = [tuple(map(sum, zip(*cases, strict=True)))]  # type: ignore[list-item]
        scores = [
            tp / (tp + fp + fn) if metric == "iou" else 2 * tp / (2 * tp + fp + fn)
            for tp, fp, fn in cases
            if tp + fp + fn
        ]
        return float(np.mean(scores)) if scores else 0.0
    if metric == "auc":
        if t.ndim == 1 and o.shape[1] == 2:
            o, t = (o[:, 1] - o[:, 0])[:, None], t[:, None]
        elif t.ndim == 1:
            o, t = torch.tensor(o).softmax(1).numpy(), np.eye(o.shape[1])[t]
        areas = [a for c in range(o.shape[1]) if (a := area(o[:, c], t[:, c])) is not None]
        return float(np.mean(areas)) if areas else 0.5
    if "perplexity" in metric:
        return float(F.cross_entropy(torch.tensor(o), torch.tensor(t)).exp())
    if metric == "top5_accuracy":
        return float(np.mean([label in np.argsort(-row)[:5] for row, label in zip(o, t)]))  # noqa: B905
    if metric == "binary_accuracy":
        real = t >= 0
        right = ((o > 0) == (t == 1)) & real
        rows = len(out)
        return float((right.reshape(rows, -1).sum(1) / real.reshape(rows, -1).sum(1)).mean())
    if metric == "masked_accuracy":
        pairs = [(a.argmax(-1) == b)[b >= 0].double().mean() for a, b in zip(out, y, strict=True)]
        return float(torch.stack(pairs).mean())
    return float((o.argmax(1) == t).mean())


CASES = [
    *[("classes", m) for m in ("accuracy", "top5_accuracy", "f1", "f1_micro", "auc", "perplexity")],
    *[("two", m) for m in ("f1", "auc")],
    *[(k, m) for k in ("binary", "many") for m in ("binary_accuracy", "f1", "f1_micro", "auc")],
    *[("tokens", m) for m in ("masked_accuracy", "token_accuracy", "perplexity", "f1",
                              "top5_accuracy")],
    *[("next", m) for m in ("next_token_accuracy", "next_token_perplexity")],
    *[("pixels", m) for m in ("pixel_accuracy", "dice", "iou")],
    *[("mask", m) for m in ("binary_accuracy", "dice", "iou")],
    *[(k, m) for k in ("numbers", "vectors") for m in ("mse", "rmse", "mae")],
]  # fmt: skip


def test_every_name_is_tested() -> None:
    assert {metric for _, metric in CASES} == METRICS.keys()
    assert {loss for *_, loss in TASKS.values()} == LOSSES.keys()


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_metric_by_the_book(kind: str, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooled, on each client's examples, and of personal and tuned models."""
    module, x, y, loss = TASKS[kind]
    module = module()
    task = Task.from_arrays(
        module, x, y, WHO, test=(x, y), test_clients=WHO, loss=loss, metric=metric, cohort=2,
        rounds=1, threshold=0.5, init="given", fine_tune=1,
    )  # fmt: skip
    monkeypatch.setattr("fedzmg.simulation.personal.EXAMPLES", 3)
    if kind in ("tokens", "many"):  # a few examples at once
        monkeypatch.setattr("fedzmg.tasks.task.LARGEST_OUTPUTS", 800)
        assert task.examples_at_once < 70
    engine: Any = "sequential" if kind == "two" else "vectorized"
    # Steps of nothing: all models stay the initial one.
    trials = [Trial.of("ditto", client_lr=1e-300, client_personal_lr=1e-300)] * 2
    simulation = Simulation(
        task, trials, rounds=1, device=torch.device("cpu"), dtype=torch.float64, engine=engine
    )
    record = simulation.run_round().records[1]
    clients = simulation.evaluate_clients()[1]
    with torch.no_grad():
        inputs = torch.tensor(x) if x.dtype == np.int64 else torch.tensor(x, dtype=torch.float64)
        out = module.double()(inputs)
    targets = torch.tensor(y)
    assert record.metric == pytest.approx(reference(metric, kind, out, targets), rel=1e-9)
    assert record.loss == pytest.approx(np.mean(reference_loss(kind, out, targets)), rel=1e-9)
    for who, rows in OF.items():
        own = reference(metric, kind, out[rows], targets[rows])
        assert clients.metric[who] == pytest.approx(own, rel=1e-9)
        assert clients.loss[who] == pytest.approx(
            np.mean(reference_loss(kind, out[rows], targets[rows])), rel=1e-9
        )
        assert clients.personal is not None
        assert clients.personal[who] == pytest.approx(own, rel=1e-9)


def test_ties_and_single_classes() -> None:
    auc = METRICS["auc"]
    assert auc.finish is not None
    for labels, scores, expected in [
        ([0, 1, 0, 1], [0.0, 0.0, 0.0, 0.0], 0.5),
        ([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8], 0.875),
        ([1, 1, 1], [0.1, 0.4, 0.4], 0.5),
        ([-1, 0, 1, -1], [5.0, 0.0, 1.0, -5.0], 1.0),
    ]:
        rows = auc.function(torch.tensor(scores), torch.tensor(labels))
        assert float(auc.finish(rows)) == expected


def test_losses_have_their_usual_metrics_and_unknown_names_a_suggestion() -> None:
    names = {loss: loss_and_metric(loss, None)[1].name for loss in LOSSES}
    assert names["binary_cross_entropy"] == "binary_accuracy"
    assert names["squared_error"] == "mse"
    assert names["cross_entropy"] == "accuracy"
    module, x, y, _ = TASKS["binary"]
    for changes, message in [
        ({"loss": "binary_crossentropy"}, "'binary_cross_entropy'"),
        ({"metric": "f1_macro"}, "'f1_micro'|'f1'"),
        ({"loss": "binary_cross_entropy", "y": y + 1}, "target 2: .*0 or 1"),
        ({"loss": "next_token_cross_entropy", "metric": "token_accuracy"}, "'next_token_accuracy'"),
        ({"metric": Metric("m", lambda o, t: o[:, 0], finish=torch.sum)}, r"m gave \(2,\).*row"),
        ({"metric": Metric("m", lambda o, t: o, finish=lambda s: s)}, r"finish gave \(1,\)"),
    ]:
        own: dict[str, Any] = {"loss": "squared_error", "y": y, **changes}
        labels = own.pop("y")
        with pytest.raises(InputError, match=message):
            Task.from_arrays(module(), x, labels, WHO, test=(x, labels), cohort=2, **own)
    with pytest.raises(InputError, match="pooled"):
        Metric("m", lambda o, t: o, pooled=True)
