"""Inputs that people have: tables, lists, odd types, dicts of tensors, datasets per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedzmg import InputError, Task, Trial, compare, simulate
from fedzmg.engine.choose import EnginePlanner
from fedzmg.models.layout import warn_once
from fedzmg.simulation import Simulation
from fedzmg.tasks import inputs
from golden_problems import Net

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 5, (24, 4)), RNG.integers(0, 3, 24)
WHO = np.repeat(np.arange(4), 6)


def frame(values: Any) -> Any:
    """Make a table or a column, with row numbers that are not positions."""
    made = pd.Series if values.ndim == 1 else pd.DataFrame
    return made(values, index=np.arange(len(values))[::-1])


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def embedded() -> nn.Module:
    return Net(lambda m, x: m.head(m.embed(x).mean(1)), embed=nn.Embedding(5, 2),
               head=nn.Linear(2, 3))  # fmt: skip


def flat(scale: float) -> nn.Module:
    return Net(lambda m, x: m.layer(x.float().flatten(1) / scale), layer=nn.Linear(4, 3))


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "frame": (linear, frame(X.astype(float)), frame(Y)),
    "frame of several types": (linear, frame(X.astype(object)), frame(Y.astype(float))),
    "nullable frame": (linear, frame(X.astype(float)).astype("Float64"), frame(Y).astype("Int64")),
    "categories": (linear, frame(X), frame(Y).astype("category")),
    "codes": (linear, X, frame(np.array(["cat", "dog", "eel"])[Y]).astype("category").cat.codes),
    "scipy": (linear, scipy.sparse.csr_array(X.astype(float)), Y),
    "sparse": (linear, torch.tensor(X).float().to_sparse(), Y),
    "column of arrays": (linear, frame(np.array([*X.astype(float), None], object)[:-1]), Y),
    "list": (linear, X.tolist(), Y.tolist()),
    "tensors": (linear, [torch.tensor(row) for row in X], [torch.tensor(y) for y in Y]),
    "arrays": (linear, list(X.astype(float)), list(Y)),
    "big-endian": (linear, X.astype(">f4"), Y.astype(">i2")),
    "longdouble": (linear, X.astype(np.longdouble), Y.astype(np.uint16)),
    "bfloat16": (linear, torch.tensor(X).bfloat16(), torch.tensor(Y).bfloat16()),
    **{kind: (linear, X.astype(kind), Y.astype(kind))
       for kind in ("float16", "float32", "int8", "int16", "int64", "uint16", "uint32")},
    **{f"ids {kind}": (embedded, X.astype(kind), Y)
       for kind in ("uint8", "int8", "int16", "int32", "int64")},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_train_to_the_same_model(form: str) -> None:
    module, x, y = FORMS[form]
    found = []
    for own_x, own_y in ((x, y), (X if module is embedded else X.astype(np.float32), Y)):
        torch.manual_seed(0)
        task = Task.from_arrays(module(), own_x, own_y, frame(WHO), test=(own_x, own_y), cohort=2)
        [history] = simulate(task, Trial.of("fedavg"), rounds=1, engine="sequential")
        found.append(history.params)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


@pytest.mark.parametrize(
    ("module", "x", "expected"),
    [
        (linear, X.astype(np.uint8), inputs.unit_pixels),
        (linear, (X > 2).astype(np.uint8), inputs.as_real),
        (linear, X, inputs.as_real),
        (linear, X > 2, inputs.as_real),
        (lambda: flat(255), X.astype(np.uint8), inputs.as_stored),
        (embedded, X.astype(np.uint8), inputs.token_ids),
        (embedded, X, inputs.as_stored),
        (linear, X.astype(np.float16), inputs.as_stored),
    ],
)
def test_default_conversion_suits_the_model(module: Any, x: Any, expected: Any) -> None:
    task = Task.from_arrays(module(), x, Y, WHO, test=(x, Y), cohort=2)
    assert task.prepare is expected


class Parts(nn.Module):
    """Numbers, pictures, ids and a scale, each as the layer for it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pixels, self.embed = nn.Linear(4, 3), nn.Linear(4, 3), nn.Embedding(5, 3)

    def forward(self, numbers: Tensor, pixels: Tensor, ids: Tensor, scaled: Tensor) -> Tensor:
        more = self.embed(ids).mean(-2) + scaled.to(self.layer.weight.dtype)[..., :3] / 255
        return self.layer(numbers) + self.pixels(pixels) + more


@pytest.mark.parametrize("kind", ["int64", "uint8", "int16", "bool"])
@pytest.mark.parametrize("ids", ["int64", "uint8", "int8"])
def test_every_part_of_a_dict_is_converted_as_a_lone_tensor_is(kind: str, ids: str) -> None:
    """Numbers and pixels become floats, ids stay whole; what the model reads is not changed."""
    bytes_ = X.astype(np.uint8)
    stored = {"numbers": X.astype(kind), "pixels": bytes_, "ids": X.astype(ids), "scaled": bytes_}
    expected = {
        "numbers": (stored["numbers"] / (255 if kind == "uint8" else 1)).astype(np.float32),
        "pixels": bytes_.astype(np.float32) / 255, "ids": X, "scaled": bytes_.astype(np.float32),
    }  # fmt: skip
    found = []
    for x in (stored, expected):
        task = Task.from_arrays(Parts(), x, Y, WHO, test=(x, Y), cohort=2)
        [history] = simulate(task, Trial.of("fedavg"), rounds=1)
        found.append(history)
    for name, leaf in found[0].params.items():
        torch.testing.assert_close(leaf, found[1].params[name])
    assert found[0].metrics == found[1].metrics


def lazy_or_not(*, lazy: bool) -> nn.Module:
    if lazy:
        own: list[nn.Module] = [nn.LazyConv1d(6, 3), nn.LazyBatchNorm1d(), nn.LazyLinear(3)]
    else:
        own = [nn.Conv1d(2, 6, 3), nn.BatchNorm1d(12), nn.Linear(12, 3)]
    return nn.Sequential(own[0], nn.Flatten(), nn.Dropout(0.2), *own[1:])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("init", ["torch", "keras", "given"])
def test_lazy_modules_train_as_those_with_shapes(init: Any, engine: Any) -> None:
    """Also from bytes, which need a conversion before there are shapes."""
    images = RNG.integers(0, 256, (24, 2, 4), dtype=np.uint8)
    lazy, found = lazy_or_not(lazy=True), []
    for model in (lazy, lazy, *([] if init == "given" else [lazy_or_not(lazy=False)])):
        torch.manual_seed(len(found))  # has no effect
        task = Task.from_arrays(model, images, Y, WHO, test=(images, Y), cohort=2, init=init)
        found += simulate(task, Trial.of("fedavg", seed=3), rounds=2, engine=engine)
    assert isinstance(lazy[-1], nn.LazyLinear)
    for name, leaf in found[0].params.items():
        assert all(torch.equal(leaf, other.params[name]) for other in found)


@pytest.mark.parametrize("last", [nn.Softmax(-1), nn.Sigmoid(), nn.LogSoftmax(-1), nn.Identity()])
def test_probabilities_as_outputs_are_warned_of_once(
    last: nn.Module, recwarn: pytest.WarningsRecorder
) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        Task.from_arrays(nn.Sequential(nn.Linear(4, 3), last), X, Y, WHO, test=(X, Y), cohort=2)
    # The cross-entropy of log-probabilities is that of the logits.
    assert len(recwarn) == isinstance(last, nn.Softmax | nn.Sigmoid)
    if isinstance(last, nn.LogSoftmax | nn.Softmax):
        recwarn.clear()
        model = nn.Sequential(nn.Linear(4, 3), last)
        Task.from_arrays(model, X, Y, WHO, test=(X, Y), cohort=2, loss=nn.NLLLoss())
        assert ["LogSoftmax" in str(w.message) for w in recwarn] == [True] * len(recwarn)
        assert len(recwarn) == isinstance(last, nn.Softmax)


class Scaled(nn.CrossEntropyLoss):
    """A loss with a scale of its own, trainable or not."""

    def __init__(self, *, trainable: bool) -> None:
        super().__init__(reduction="none")
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trainable)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs * self.scale, targets)


@pytest.mark.parametrize("trainable", [True, False])
def test_trainable_parameters_of_a_loss_are_warned_of(
    trainable: bool, recwarn: pytest.WarningsRecorder
) -> None:
    warn_once.cache_clear()
    loss = Scaled(trainable=trainable)
    Task.from_arrays(nn.Linear(4, 3), X, Y, WHO, test=(X, Y), cohort=2, loss=loss)
    assert ["scale" in str(w.message) for w in recwarn] == [True] * trainable


class Rows(Dataset[Any]):
    """A dataset with a transform, which torch cannot iterate to an end."""

    def __init__(self, rows: Any, *, named: bool = False) -> None:
        self.rows, self.named, self.read = rows, named, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        x, y = X[self.rows[i]].astype(np.float32) * 2, int(Y[self.rows[i]])
        return {"pixels": x, "label": y} if self.named else (x, y)


def padded(samples: list[Any]) -> Any:
    return torch.tensor([[*x] for x, _ in samples]).float(), torch.tensor([y for _, y in samples])


def hugging_face(rows: Any, kind: str) -> Any:
    import datasets

    found = datasets.Dataset.from_dict({"label": Y[rows], "pixels": X[rows].astype(np.float32) * 2})
    made = {"iterable": found.to_iterable_dataset, "columns": lambda: zip(*columns, strict=True)}
    columns = found["pixels"], found["label"]
    return made[kind]() if kind in made else found.with_format(kind or None)


real = [f"hugging face {kind}".strip() for kind in ("", "torch", "numpy", "iterable", "columns")]


@pytest.mark.filterwarnings("ignore:::(datasets|dill|pyarrow|multiprocess|fsspec|huggingface_hub)")
@pytest.mark.parametrize(
    "kind",
    ["pairs", "dicts", "lists", "tensors", "iterables", "collate", "columns", "loader", *real],
)
def test_one_dataset_per_client(kind: str) -> None:
    double = X.astype(np.float32) * 2
    mine = [np.flatnonzero(who == WHO) for who in range(4)]
    make: Any = {
        "pairs": Rows,
        "dicts": lambda rows: Rows(rows, named=True),
        "lists": lambda rows: [(double[i], Y[i]) for i in rows],
        "tensors": lambda rows: TensorDataset(torch.tensor(double)[rows], torch.tensor(Y)[rows]),
        "iterables": lambda rows: ((double[i], Y[i]) for i in rows),
        "collate": lambda rows: [(double[i].tolist(), Y[i]) for i in rows],
        "columns": lambda rows: {"label": Y[rows].tolist(), "pixels": double[rows]},
        "loader": lambda rows: DataLoader(Rows(rows), batch_size=2, shuffle=True),
        **{name: lambda rows: hugging_face(rows, kind[len(real[0]) + 1 :]) for name in real},
    }[kind]
    parts = [make(rows) for rows in mine]
    task = Task.from_datasets(
        linear(), {f"c{9 - i}": part for i, part in enumerate(parts)}, test=make(range(24)),
        tune=make(range(5)) if kind == "pairs" else {"a": make(range(2)), "b": make(range(2, 5))},
        collate=padded if kind == "collate" else None, cohort=2,
    )  # fmt: skip
    own = Task.from_arrays(linear(), double, Y, WHO, test=(double, Y), cohort=2)
    assert task.train.names == ("c9", "c8", "c7", "c6")
    assert torch.equal(task.train.examples.x, own.train.examples.x)
    assert torch.equal(task.train.examples.y, own.train.examples.y)
    assert torch.equal(task.test.x, own.test.x)
    assert task.tune is not None
    assert task.tune.size == 5
    if kind == "pairs":
        assert [part.read for part in parts] == [6] * 4


def test_tuples_of_arrays_in_datasets_are_arguments() -> None:
    rows = [((x.astype(np.float32), torch.tensor(x)), y) for x, y in zip(X, Y, strict=True)]
    task = Task.from_datasets(nn.Bilinear(4, 4, 3), [rows[:9], rows[9:]], test=rows, cohort=2)
    for part in task.train.examples.x:
        assert part.tolist() == X.tolist()


def test_test_datasets_of_clients() -> None:
    parts = [Rows(np.flatnonzero(who == WHO)) for who in range(4)]
    task = Task.from_datasets(linear(), parts, test=parts[::-1][:2], cohort=2)
    assert task.test_owners is not None
    assert task.test_owners.tolist() == [0] * 6 + [1] * 6
    for wrong, message in [
        (Rows(range(4)), "datasets is a Rows"),
        ([Rows([])], "client 0 holds no example"),
        ([{"a": X, "label": Y[1:]}], "client 0 has columns"),
        ([3], "client 0 is a int"),
        ([[X[0]]], "gives a ndarray"),
        ([[{"a": 1, "b": 2}]], "dict of a, b: .*'label'"),
        ([[{"text": "to be", "label": 1}]], "'to be'"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            Task.from_datasets(linear(), wrong, test=parts[0], cohort=1)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@dataclass
class Output:
    """Output of a model of transformers."""

    logits: Tensor
    loss: None = None


class Masked(nn.Module):
    """Tokens and a mask in, an object with logits out, as transformers' models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, scale: float = 1.0) -> Any:
        mask = attention_mask[..., None].to(self.head.weight.dtype)
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1) * scale
        return Output(self.head(self.drop(mean)))


class Packed(Masked):
    """The same from one tensor."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x[..., 0], x[..., 1]).logits


class Nested(Masked):
    """The same from a dict of dicts, and from positional arguments."""

    def forward(self, text: dict[str, Tensor], more: Any) -> Any:  # type: ignore[override]
        return super().forward(text["ids"], more["mask"]["own"])


class TakesDict(Masked):
    """The same from one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(batch["input_ids"], batch["attention_mask"]).logits


@pytest.mark.parametrize(
    ("engine", "device"),
    [
        ("sequential", "cpu"),
        ("vectorized", "cpu"),
        ("cuda_graph", "cpu"),
        pytest.param("compiled", "cpu", marks=pytest.mark.slow),
        pytest.param("compiled_cuda_graph", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_several_inputs_train_as_one_tensor_does(engine: Any, device: str) -> None:
    """Personal models, fine-tuning and evaluation by client included."""
    mask = (RNG.random((24, 4)) < 0.7).astype(np.int64)
    named = {"input_ids": X, "attention_mask": mask}
    found = []
    nested = {"text": {"ids": X}, "more": {"mask": {"own": mask}}}
    for kind, x in (
        (Masked, named), (TakesDict, named), (Packed, np.stack([X, mask], -1)),
        (Masked, (X, mask.tolist())), (Nested, nested), (Nested, tuple(nested.values())),
    ):  # fmt: skip
        torch.manual_seed(0)
        task = Task.from_arrays(
            kind(), x, Y, WHO, test=(x, Y), test_clients=WHO, tune=(x, Y), cohort=3,
            batch_size=4, rounds=2, fine_tune=1, init="given",
        )  # fmt: skip
        simulation = Simulation(
            task, [Trial.of("ditto")], rounds=2, device=torch.device(device), dtype=torch.float64,
            engine=EnginePlanner("compiled", backend="eager") if engine == "compiled" else engine,
        )  # fmt: skip
        records = [simulation.run_round().records[0] for _ in range(2)]
        [history], [clients] = simulation.histories([records]), simulation.evaluate_clients()
        found.append((task, history, clients))
    [(task, one, own), *others] = found
    for _, other, theirs in others:
        assert one.metrics == pytest.approx(other.metrics, rel=1e-9)
        for name in one.params:
            torch.testing.assert_close(one.params[name], other.params[name], rtol=1e-9, atol=1e-9)
        for field in ("metric", "loss", "personal", "tuned"):
            assert getattr(own, field) == pytest.approx(getattr(theirs, field), rel=1e-9)
    swapped = {"attention_mask": X, "input_ids": mask}
    other_task = Task.from_arrays(Masked(), swapped, Y, WHO, test=(swapped, Y), cohort=2)
    assert other_task.train.fingerprint() != task.train.fingerprint()
    for inner in (named, {"input_ids": {"a": X}, "attention_mask": mask}, (X, mask)):
        with pytest.raises(InputError, match="cannot read training data of ") as caught:
            Task.from_arrays(linear(), inner, Y, WHO, test=(inner, Y), cohort=2)
        assert "\n" not in str(caught.value)


def test_keys_that_forward_does_not_take_and_numbers_for_classes_are_named() -> None:
    ids = {"input_ids": X, "attention_mask": np.ones_like(X), "token_type_ids": X}
    with pytest.raises(InputError, match="token_type_ids"):
        Task.from_arrays(Masked(), ids, Y, WHO, test=(ids, Y), cohort=2)
    whole = Net(lambda m, x: m.head(m.embed(x["x"]).mean(1)), **embedded()._modules)
    taken = {"x": X, "unused": X}  # by a model whose argument has the name of a key
    Task.from_arrays(whole, taken, Y, WHO, test=(taken, Y), cohort=2)
    floats = X.astype(np.float32)
    for metric in ("f1", "accuracy"):
        with pytest.raises(InputError, match="targets of 0 and 1"):
            Task.from_arrays(
                linear(), floats, floats[:, :3] / 7, WHO, test=(floats, floats[:, :3] / 7),
                cohort=2, loss=nn.MSELoss(), metric=metric,
            )  # fmt: skip


def test_personal_models_are_evaluated_before_their_memory_ends() -> None:
    x = X.astype(np.float32)
    task = Task.from_arrays(
        linear(), x, Y, WHO, test=(x, Y), test_clients=WHO, cohort=4, batch_size=6, fine_tune=1
    )
    [ditto] = simulate(task, Trial.of("ditto"), rounds=1)
    compared = compare(task, ["ditto"], seeds=1, rounds=1, progress=False)
    [kept] = compared.study.members["ditto"]
    found, there = ditto.client_metrics(), kept.clients[-1]
    for own, other in ((found.personal, there.personal), (found.tuned, there.tuned)):
        assert own is not None
        np.testing.assert_array_equal(own, other)
    assert f"{np.mean(there.personal):.4f}" in str(compared)
