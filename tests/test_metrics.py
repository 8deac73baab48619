"""Ready-made losses and metrics against plain formulas, pooled and by client, on every path."""

from __future__ import annotations

import functools
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


GEN = torch.Generator().manual_seed(0)
LABELS, NUMBERS = torch.randint(0, 3, (12, 5, 5), generator=GEN), torch.randn(12, 3).double()
TARGETS = {
    "labels": LABELS[:, 0, 0], "images": LABELS, "yes": LABELS[:, 0, :3].clamp(max=1),
    "ignored": torch.cat([torch.full((12, 1, 5), 2), LABELS[:, 1:].clamp(max=1)], 1),
    "one-hot": torch.eye(3)[LABELS[:, 0, 0]].double(), "shares": NUMBERS.softmax(1),
    "numbers": NUMBERS,
}  # fmt: skip
TORCH_LOSSES: list[tuple[Any, str, str | None]] = [
    (nn.CrossEntropyLoss(), "labels", "accuracy"), (F.cross_entropy, "labels", "accuracy"),
    (nn.CrossEntropyLoss(label_smoothing=0.1), "labels", "accuracy"),
    (nn.CrossEntropyLoss(reduction="none"), "labels", "accuracy"),
    (functools.partial(F.cross_entropy, label_smoothing=0.1), "labels", "accuracy"),
    (nn.CrossEntropyLoss(), "one-hot", "accuracy"), (F.cross_entropy, "shares", "accuracy"),
    (nn.CrossEntropyLoss(), "images", "pixel_accuracy"),
    (nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.2), "ignored", "pixel_accuracy"),
    (nn.NLLLoss(), "labels", "accuracy"), (F.nll_loss, "labels", "accuracy"),
    (nn.NLLLoss(), "images", "pixel_accuracy"), (nn.MultiMarginLoss(), "labels", "accuracy"),
    (nn.MSELoss(), "numbers", "mse"), (F.mse_loss, "numbers", "mse"),
    (nn.L1Loss(), "numbers", "mae"), (F.l1_loss, "numbers", "mae"),
    (nn.SmoothL1Loss(beta=0.3), "numbers", "mae"), (nn.HuberLoss(), "numbers", "mae"),
    (nn.BCEWithLogitsLoss(), "yes", "binary_accuracy"),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3])), "yes", "binary_accuracy"),
    (F.binary_cross_entropy_with_logits, "yes", "binary_accuracy"),
    (nn.KLDivLoss(reduction="batchmean"), "shares", None), (nn.PoissonNLLLoss(), "numbers", None),
    (nn.SoftMarginLoss(), "numbers", None), (nn.MultiLabelMarginLoss(), "yes", None),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "kind", "metric"), TORCH_LOSSES)
def test_a_loss_of_torch_is_its_mean_over_examples(loss: Any, kind: str, metric: Any) -> None:
    """As torch has it if examples have equally many values; gradients included."""
    y = TARGETS[kind]
    own, found = loss_and_metric(loss, metric or "mse", y)
    outputs = torch.randn(12, 3, *y.shape[1:] if y.ndim > 2 else (), generator=GEN).double()
    ours, theirs = (outputs.clone().requires_grad_() for _ in range(2))
    losses = own(ours, y)
    real = kind == "yes" and not isinstance(loss, nn.MultiLabelMarginLoss)
    wanted = loss(theirs, y.double() if real else y).mean()
    losses.mean().backward()
    wanted.backward()
    assert losses.shape == (12,)
    torch.testing.assert_close(losses.mean(), wanted)
    torch.testing.assert_close(ours.grad, theirs.grad)
    found.check_values(found.function(outputs, y), 12)
    if metric is None:
        with pytest.raises(InputError, match="pass metric="):
            loss_and_metric(loss, None, y)
    else:
        assert loss_and_metric(loss, None, y)[1].name == metric


@pytest.mark.parametrize("shape", [(4,), (4, 4)])
def test_metrics_read_what_losses_of_torch_read(shape: tuple[int, ...]) -> None:
    """Classes on axis 1, as many as positions, and labels that are ignored."""
    outputs = torch.randn(12, 4, *shape, generator=GEN)
    y = torch.randint(0, 4, (12, *shape), generator=GEN)
    y[:, 0] = 9
    loss = nn.CrossEntropyLoss(ignore_index=9)
    share = (outputs.argmax(1) == y)[y != 9].double().mean()
    for metric, expected in ((None, share), ("perplexity", loss(outputs, y).exp())):
        found = loss_and_metric(loss, metric, y)[1]
        rows = found.function(outputs, y)
        value = rows.mean() if found.finish is None else found.finish(rows.double().sum(0))
        torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (nn.CrossEntropyLoss(torch.ones(3)), LABELS[:, 0, 0], "CrossEntropyLoss .*weight .*'none'"),
        (functools.partial(F.nll_loss, weight=torch.ones(3)), LABELS[:, 0, 0], "nll_loss .*weight"),
        (nn.MSELoss(reduction="sum"), NUMBERS, "MSELoss .*'sum' .*'none'"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), LABELS[:, 0, 0] + 1, "label 3 .* 3 outputs"),
        (nn.NLLLoss(ignore_index=2), LABELS[:, 0, 0], "label 2, which is ignored"),
        (nn.CrossEntropyLoss(), LABELS[:, 0, 0] - 100, "label -100"),
    ],
)
def test_losses_of_torch_that_depend_on_the_batch_are_rejected(
    loss: Any, y: Any, message: str
) -> None:
    x = X[:12]
    with pytest.raises(InputError, match=message):
        Task.from_arrays(nn.Linear(6, 3), x, y, WHO[:12], test=(x, y), cohort=2, loss=loss)


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "cuda_graph"])
def test_losses_of_torch_train_as_named_ones(engine: Any) -> None:
    """Log-probabilities are logits, and weights of a loss follow the precision."""
    y, yes = RNG.integers(0, 3, N), RNG.integers(0, 2, N).astype(np.float32)
    logits, logs = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1))
    logs[0] = logits
    single, one = nn.Linear(6, 1), nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))
    cases: list[list[tuple[Any, Any, Any]]] = [
        [(logits, y, "cross_entropy"), (logs, y, nn.NLLLoss()), (logs, y, F.nll_loss),
         (logs, y, nn.CrossEntropyLoss()), (logits, y, functools.partial(F.cross_entropy)),
         (logits, np.eye(3)[y], F.cross_entropy), (logits, np.eye(3)[y], nn.CrossEntropyLoss())],
        [(single, own, loss) for own in (yes, yes[:, None], yes.astype(int))
         for loss in ("binary_cross_entropy", nn.BCEWithLogitsLoss(), one)],
    ]  # fmt: skip
    for same in cases:
        found = []
        for model, labels, loss in same:
            task = Task.from_arrays(
                model, X, labels, WHO, test=(X, labels), cohort=3, loss=loss, init="given"
            )
            simulation = Simulation(
                task, [Trial.of("fedavg")], rounds=2, device=torch.device("cpu"),
                dtype=torch.float64, engine=engine,
            )  # fmt: skip
            simulation.run_round()
            scores = simulation.evaluate()[0]
            params = simulation.snapshot.params.values()
            found.append([*scores, *(float(leaf.sum()) for leaf in params)])
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-9)


def test_losses_have_their_usual_metrics_and_unknown_names_a_suggestion() -> None:
    names = {loss: loss_and_metric(loss, None, torch.ones(2))[1].name for loss in LOSSES}
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
        ({"metric": Metric("m", lambda o, t: o, finish=lambda s: s)}, r"finish gave \(1, 1\)"),
        ({"metric": Metric("m", lambda o, t: o, finish=torch.sum)}, r"finish gave \(\)"),
    ]:
        own: dict[str, Any] = {"loss": "squared_error", "y": y, **changes}
        labels = own.pop("y")
        with pytest.raises(InputError, match=message):
            Task.from_arrays(module(), x, labels, WHO, test=(x, labels), cohort=2, **own)
    with pytest.raises(InputError, match="pooled"):
        Metric("m", lambda o, t: o, pooled=True)
