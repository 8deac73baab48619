"""Tasks: parts that fit are accepted; others are rejected in one line."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import InputError, Metric, Parts, Task, Trial, simulate
from fedzmg.data.columns import Columns
from fedzmg.data.formats import arrays
from fedzmg.evaluation import accuracy
from fedzmg.metrics import masked_accuracy
from fedzmg.models.objective import cross_entropy, masked_cross_entropy
from fedzmg.tasks.inputs import as_stored
from fedzmg.tree import row
from golden_problems import Net

RNG = np.random.default_rng(0)
X, Y, WHO = RNG.normal(size=(30, 4)), RNG.integers(0, 3, 30), np.arange(30) % 5


def make(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "model": nn.Linear(4, 3), "x": X, "y": Y, "clients": WHO, "test": (X, Y), "cohort": 2
    }  # fmt: skip
    parts |= changes
    return Task.from_arrays(
        parts.pop("model"), parts.pop("x"), parts.pop("y"), parts.pop("clients"), **parts
    )


def network(run: Any) -> nn.Module:
    return Net(run, layer=nn.Linear(4, 3))


def unfinished(model: nn.Module, x: Tensor) -> Tensor:
    raise NotImplementedError


IMAGES = network(lambda m, x: m.layer(x)[..., None].expand(-1, -1, 5))
PIXELS = RNG.integers(0, 256, (30, 5, 6, 3), dtype=np.uint8)
SIGMOID = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
NORMALISED = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": Y[:-1]}, r"\(30, 4\).*\(29,\)"),
        ({"clients": WHO[:-1]}, "29 client ids for 30"),
        ({"client_names": [0, 1, 2, 3, 4, "x"]}, "'x'"),
        ({"client_names": [0, 1]}, "names"),
        ({"client_names": 5}, "client_names = 5"),
        ({"clients": np.where(WHO == 4, np.nan, WHO)}, "example 4 .*nan"),
        ({"x": X[:, :3]}, r"training data of shape \(3,\)"),
        ({"x": X[:0], "y": Y[:0], "clients": WHO[:0]}, "no example"),
        ({"x": np.where(X > 2, np.nan, X)}, "not finite in example"),
        ({"x": [["a"] * 4] * 30}, "cannot be read"),
        ({"x": np.array(["a"] * 30)}, "training data inputs"),
        ({"y": Y + 1}, "label 3 .* 3 outputs"),
        ({"y": Y + 0.5}, "float64 labels"),
        ({"y": Y[:, None]}, r"\(30, 1\).*squeeze"),
        ({"y": np.eye(3)[Y]}, r"\(30, 3\).*argmax\(1\)"),
        ({"y": Y.astype(str)}, "targets .*'[012]'.*np.unique"),
        ({"x": {}}, "empty dict"),
        ({"x": {"a": X, "b": X[:7]}}, r"\(7, 4\) .*\(30,\)"),
        ({"x": {"a": X}}, r"training data of \['a'\] shape \(4,\)"),
        ({"num_rounds": 3}, "'num_rounds': did you mean 'rounds'"),
        ({"fraction_fit": 0.1}, "did you mean 'cohort'"),
        ({"learning_rate": 0.1}, "learning_rate belongs to an algorithm"),
        ({"test": (X, Y + 5)}, "test data .* label"),
        ({"test": None}, "test is a NoneType"),
        ({"test": X}, "test is a ndarray"),
        ({"tune": X}, r"tune is a ndarray: .*tune=\("),
        ({"tune": (X[:, :3], Y)}, r"tuning data of shape \(3,\)"),
        ({"tune": (X, Y + 3)}, "tuning data .* label"),
        ({"test_clients": ["a"] * 30}, "test_clients: 'a'"),
        ({"test_clients": [0] * 29}, "29 owners of 30 test examples"),
        ({"test_clients": [[0]] * 30}, r"test_clients: .*\(30, 1\)"),
        ({"parts": Parts(personal=("*",))}, "parts \\* leave no"),
        ({"parts": Parts(frozen=("last:9",))}, "parts last:9 leave no"),
        ({"parts": Parts(personal=("neck",))}, "'neck' matches no"),
        ({"cohort": 6}, "cohort = 6 but there are 5 clients"),
        ({"cohort": 0}, "cohort = 0: .* from 1 to"),
        ({"batch_size": 2.5}, "batch_size = 2.5"),
        ({"straddle": 1}, "straddle = 1"),
        ({"epoch": 3}, "'epoch': did you mean 'epochs'"),
        ({"threshold": float("nan")}, "threshold = nan"),
        ({"threshold": 90}, "threshold = 90: .*0.90"),
        ({"batch_norm": "local"}, "batch_norm = 'local': .*no BatchNorm"),
        ({"batch_norm": "avrage", "model": NORMALISED}, "'avrage': did you mean 'average'"),
        ({"model": nn.Linear}, "class Linear"),
        ({"model": torch.relu}, "builtin_function_or_method"),
        ({"model": network(lambda m, x: (m.layer(x), x))}, "gives a tuple"),
        ({"model": network(unfinished)}, "NotImplementedError$"),
        ({"model": nn.Sequential(nn.LazyConv2d(3, 2))}, r"of shape \(4,\).*: RuntimeError"),
        (
            {"loss": lambda o, t: nn.functional.cross_entropy(o, t)},
            r"loss gave \(\) for 2 .*'none'",
        ),
        ({"loss": lambda o, t: o + torch.zeros(7)}, "loss fails"),
        ({"model": nn.Linear(4, 1)}, "1 outputs.*'binary_cross_entropy'"),
        ({"y": X[:, 0]}, "'squared_error'"),
        ({"x": PIXELS, "model": nn.Conv2d(3, 2, 1)}, r"channels first: x.transpose\(0, 3, 1, 2\)"),
        ({"x": PIXELS[..., 0], "model": nn.Conv2d(1, 2, 1)}, r"x\[:, None\]"),
        ({"loss": nn.BCELoss(), "y": Y > 0, "model": SIGMOID}, "BCEWithLogitsLoss"),
        ({"loss": nn.BCELoss(), "y": Y > 0, "model": SIGMOID, "metric": "f1"}, "BCEWithLogitsLoss"),
        ({"loss": nn.CrossEntropyLoss}, "loss: .*class .*CrossEntropyLoss"),
        ({"loss": None}, "loss: .*None$"),
        ({"metric": Metric("m", lambda o, t: o)}, r"metric m gave \(2, 3\)"),
        ({"loss": "squared_error"}, r"\(30,\).*\(2, 3\): squared_error"),
        ({"y": np.eye(3)[Y] + np.eye(3)[0] * (Y == 1)[:, None]}, "'binary_cross_entropy'"),
        ({"y": np.zeros((30, 5), int), "model": IMAGES}, r"\(2, 3, 5\).*'pixel_cross_entropy'"),
        ({"metric": accuracy}, "metric: .*function"),
        ({"prepare": 3}, "prepare: .*3$"),
        ({"prepare": lambda x, dtype: {}["mean"]}, "KeyError 'mean'$"),
        ({"init": "kears"}, "'kears': did you mean 'keras'"),
        ({"name": None}, "name: .*None$"),
        ({"axes": {"wieght": (1,)}}, "'wieght'"),
        ({"axes": ["weight"]}, r"axes = \['weight'\]"),
        ({"axes": {"weight": (2,)}}, "axes .*weight"),
    ],
)
def test_unsuitable_parts_are_rejected_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "function"), [(accuracy, "accuracy"), ("m", None), ("", abs)])
def test_a_metric_needs_a_name_and_a_function(name: Any, function: Any) -> None:
    with pytest.raises(InputError, match=r"^metric .*expected"):
        Metric(name, function)


def test_negative_metric_to_maximise_is_rejected() -> None:
    """A run that diverged counts as 0, and would be the best of all."""

    def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(outputs, targets, reduction="none")

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return -likelihood(outputs, targets)

    with pytest.raises(InputError, match=r"'likelihood' is -\d.*higher_is_better=False"):
        simulate(make(metric=Metric("likelihood", likelihood)), Trial.of("fedavg"), rounds=1)
    # The remedy in the message: a diverged run is then the worst.
    negated = make(metric=Metric("loss", loss, higher_is_better=False))
    trials = [Trial.of("fedavg", client_lr=rate) for rate in (0.1, 3e38)]
    trained, diverged = simulate(negated, trials, rounds=6)
    assert diverged.diverged is not None
    assert trained.metrics[-1] < diverged.metrics[-1] == math.inf


def scaled_by(factor: float) -> Any:
    """Return a new callable, whose repr holds a memory address."""

    def scaled(x: Tensor, dtype: torch.dtype, by: float) -> Tensor:
        return x.to(dtype) * by

    return functools.partial(scaled, by=factor)


def test_fingerprint_ignores_memory_addresses() -> None:
    one, same, other = (scaled_by(factor) for factor in (1.0, 1.0, 2.0))
    assert repr(one) != repr(same)
    prints = [make(prepare=prepare).fingerprint() for prepare in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_a_change_of_protocol_does_not_try_the_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    task, tried = make(), []
    try_out = task.model.try_out
    monkeypatch.setattr(task.model, "try_out", lambda *own: tried.append(own) or try_out(*own))
    replace(task, protocol=task.protocol.with_options({"epochs": 2}))
    assert not tried
    replace(task, test=row(task.test, slice(3)))
    assert len(tried) == 1


def columns(clients: Any = WHO, **changes: Any) -> Columns:
    made = arrays.from_arrays(X.astype(np.float32), Y, clients)
    return replace(made, **changes)


def test_a_task_from_columns_is_the_one_from_arrays() -> None:
    names = [f"c{i}" for i in WHO]
    made = Task.from_columns(
        nn.Linear(4, 3), columns(names), test=columns(None), name="own", cohort=2, rounds=3
    )
    same = make(x=X.astype(np.float32), clients=names, test=(X.astype(np.float32), Y))
    assert made.train.fingerprint() == same.train.fingerprint()
    assert torch.equal(made.test.x, same.test.x)
    assert torch.equal(made.test.y, same.test.y)
    assert (made.name, made.protocol.rounds, made.test_owners) == ("own", 3, None)


def test_tuning_examples_come_from_arrays_or_columns() -> None:
    tune = (X[:7].astype(np.float32), Y[:7])
    rows = arrays.from_arrays(*tune, None)
    made = Task.from_columns(nn.Linear(4, 3), columns(), test=columns(), tune=rows, cohort=2)
    for one in (made, make(tune=tune)):
        assert one.tune is not None
        assert one.tune.x.tolist() == tune[0].tolist()
        assert one.tune.y.tolist() == tune[1].tolist()
    with pytest.raises(InputError, match="tuning data has the classes b"):
        Task.from_columns(
            nn.Linear(4, 3), columns(), test=columns(), tune=replace(rows, classes=("b",)), cohort=2
        )


def test_test_rows_are_matched_to_training_clients() -> None:
    owners = make(test_clients=(np.arange(30) + 1) % 7).test_owners
    assert owners is not None
    assert owners.tolist() == [i if i < 5 else -1 for i in (np.arange(30) + 1) % 7]
    made = Task.from_columns(
        nn.Linear(4, 3), columns(["a", "b", "c"] * 10), cohort=1,
        test=columns(["c", "a", "z"] * 10),
    )  # fmt: skip
    assert made.test_owners is not None
    assert made.test_owners.tolist() == [0] * 10 + [2] * 10 + [-1] * 10
    elsewhere = columns(["x", "y", "z"] * 10)
    made = Task.from_columns(nn.Linear(4, 3), columns(), test=elsewhere, cohort=1)
    assert made.test_owners is None


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("visits.csv", columns(), "training data is a str"),
        (columns(), (X, Y), "test data is a tuple"),
        (columns(), None, "test data is a NoneType"),
        (columns(None), columns(), "training data .*clients"),
        (arrays.from_arrays(X, None, WHO), columns(), "Columns of x: "),
        (arrays.from_arrays(["to be"] * 30, Y, WHO), columns(), "Columns of text, y: "),
        (columns(classes=("a", "b", "c")), columns(classes=("b", "c")), "classes b, c, .* a, b, c"),
        (columns(classes=("a", "b", "c")), columns(), "classes none"),
    ],
)
def test_unsuitable_columns_are_rejected_in_one_line(train: Any, test: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Task.from_columns(nn.Linear(4, 3), train, test=test, cohort=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["test_clients", "client_names", "notes", "losss", "cohrt"])
def test_wrong_arguments_are_named_in_one_line(name: str) -> None:
    rows = [[(row, int(label)) for row, label in zip(X.astype(np.float32), Y, strict=True)]]
    net = nn.Linear(4, 3)
    makers: list[Callable[..., Task]] = [
        lambda **more: Task.from_columns(net, columns(), test=columns(), **more),
        lambda **more: Task.from_datasets(net, rows, test=rows, **more),
    ]
    for maker in makers:
        if maker is makers[1] and name == "notes":
            continue
        with pytest.raises(InputError, match=name) as caught:
            maker(**{name: WHO}, **({} if name == "cohrt" else {"cohort": 1}))
        assert "\n" not in str(caught.value)
        near = {"losss": "loss", "cohrt": "cohort"}.get(name, name)
        assert f"{near}" in str(caught.value)


def test_labels_of_padded_targets_are_checked() -> None:
    model = nn.Embedding(3, 3)
    tokens, targets = np.zeros((6, 4), np.int64), np.full((6, 4), -1)
    targets[:, 0] = 2
    parts = {"model": model, "x": tokens, "clients": np.arange(6) % 2, "loss": masked_cross_entropy}
    parts |= {"metric": Metric("accuracy", masked_accuracy)}
    make(**parts, y=targets, test=(tokens, targets))
    with pytest.raises(InputError, match="label 3 but the model has 3 outputs"):
        make(**parts, y=targets + (targets == 2), test=(tokens, targets))


def test_bytes_of_columns_become_fractions() -> None:
    pixels = RNG.integers(0, 256, (6, 2, 2), dtype=np.uint8)
    images = arrays.from_arrays(pixels, np.arange(6) % 3, np.arange(6) % 2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    made = Task.from_columns(net, images, test=images, cohort=1)
    assert made.train.examples.x.dtype == torch.uint8
    read = made.prepare(made.train.examples.x, torch.float32)
    torch.testing.assert_close(read, made.train.examples.x / 255)
    assert made.prepare is not as_stored
    own = Task.from_columns(
        net, images, test=images, cohort=1, prepare=lambda x, dtype: x.to(dtype)
    )
    assert torch.equal(own.prepare(pixel := torch.tensor([7], dtype=torch.uint8), torch.float32),
                       pixel.float())  # fmt: skip


def test_masked_loss_and_accuracy_see_only_real_positions() -> None:
    logits = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.arange(24).reshape(4, 6) % 5
    lengths = [6, 1, 3, 5]
    for i, length in enumerate(lengths):
        targets[i, length:] = -1
    loss, score = masked_cross_entropy(logits, targets), masked_accuracy(logits, targets)
    for i, n in enumerate(lengths):
        own, wanted = logits[i, :n], targets[i, :n]
        torch.testing.assert_close(loss[i], nn.functional.cross_entropy(own, wanted))
        assert score[i] == (own.argmax(-1) == wanted).double().mean()
    full = targets.clamp(min=0)
    torch.testing.assert_close(masked_cross_entropy(logits, full), cross_entropy(logits, full))
