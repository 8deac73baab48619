"""Modules as people write them: each trains alike under both engines, or is refused in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import LABELS, assert_engines_agree, federation, ids, normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedzmg import Metric, Task, Trial, simulate
from fedzmg.errors import InputError
from fedzmg.models import FunctionalModel

IMAGES = normal(3, 8, 8)
VECTORS = normal(6)
SEQUENCES = normal(5, 8)
TEXT = ids(11, 6)


class Then(nn.Module):
    """A module of sequences, and a dense layer on the mean over time."""

    def __init__(self, inner: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x).mean(1))
        return out


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)
        self.fc1, self.fc2 = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x)).flatten(1)
        out: Tensor = self.fc2(F.relu(self.fc1(x)))
        return out


class LSTMLoop(nn.Module):
    def __init__(self, cell: type[nn.RNNCellBase] = nn.LSTMCell) -> None:
        super().__init__()
        self.cell: Any = cell(8, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for now in x.unbind(1):
            state = self.cell(now, state)
        out: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return out


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 2, stride=2)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(torch.tanh(self.down(x)))
        return out


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), norm(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x + self.norm(self.conv(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.inner(self.embedding(tokens))))
        return out


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bilinear(x[:, :3], x[:, 3:])
        return out


class Constant(nn.Module):
    """A fixed matrix that is no buffer, e.g. the positions of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.mixing = torch.eye(6).roll(1, 0) * 2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x @ self.mixing)
        return out


class Own(nn.Module):
    """Parameters of a type that the library has never seen."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x * self.gain)
        return out


class Twice(nn.Module):
    """One dropout layer used in two places of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.drop(torch.relu(self.first(self.drop(x)))))
        return out


class Branch(nn.Module):
    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(6, 3), of

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if self.of(x, out).sum() > 0 else -out


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


def encoder(*, attention_dropout: float | None = None, **more: Any) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(8, 2, 16, **more)
    if attention_dropout is not None:
        layer.self_attn.dropout = attention_dropout
    return layer


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


def classify(module: nn.Module, x: Any) -> Callable[[], Task]:
    return lambda: federation(module, x)


WEIGHT_NORM = "0.parametrizations.weight.original"

WORK: dict[str, Callable[[], Task]] = {
    "lenet": classify(LeNet(), IMAGES),
    "layer-norm-mlp": classify(
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), VECTORS
    ),
    "in-place-relu": classify(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), VECTORS
    ),
    "group-norm-residual": classify(Residual(lambda c: nn.GroupNorm(1, c)), IMAGES),
    "instance-norm": classify(Residual(nn.InstanceNorm2d), IMAGES),
    "instance-norm-affine": classify(
        Residual(lambda c: nn.InstanceNorm2d(c, affine=True)), IMAGES
    ),
    "lstm-cell": classify(LSTMLoop(), SEQUENCES),
    "gru-cell": classify(LSTMLoop(nn.GRUCell), SEQUENCES),
    "rnn-cell": classify(LSTMLoop(nn.RNNCell), SEQUENCES),
    "attention": classify(Then(Attention()), SEQUENCES),
    "encoder": classify(Then(encoder(dropout=0.0, batch_first=True)), SEQUENCES),
    "encoder-dropout": classify(
        Then(encoder(batch_first=True, attention_dropout=0.0)), SEQUENCES
    ),
    "encoder-stack": classify(
        Then(nn.TransformerEncoder(encoder(dropout=0.0, batch_first=True), 2)), SEQUENCES
    ),
    "text-cnn": classify(
        nn.Sequential(
            nn.Embedding(11, 8), Swap(), nn.Conv1d(8, 5, 3), nn.ReLU(),
            nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(5, 3),
        ),
        TEXT,
    ),
    "embedding-bag": classify(nn.Sequential(nn.EmbeddingBag(11, 8), nn.Linear(8, 3)), TEXT),
    "autoencoder": lambda: federation(
        Autoencoder(), IMAGES, IMAGES, loss=squared, metric=Metric("error", squared, False)
    ),
    "depthwise": classify(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 4, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        ),
        IMAGES,
    ),
    "tied": lambda: federation(Tied(), TEXT, TEXT, axes={"embedding.weight": (0,)}),
    "bilinear": classify(Pairs(), VECTORS),
    "prelu": classify(nn.Sequential(nn.Linear(6, 4), nn.PReLU(4), nn.Linear(4, 3)), VECTORS),
    "plain-tensor": classify(Constant(), VECTORS),
    "dropout-twice": classify(Twice(), VECTORS),
    "own-parameter": lambda: federation(Own(), VECTORS, init="given", axes={"gain": ()}),
    "weight-norm": lambda: federation(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)),
        VECTORS,
        init="given",
        axes={f"{WEIGHT_NORM}0": (), f"{WEIGHT_NORM}1": (1,)},
    ),
    "fused-attention": classify(Then(FusedAttention()), SEQUENCES),
}  # fmt: skip

SLOW_IN_TORCH = {"weight-norm", "fused-attention"}
"""Operations that torch maps by a loop over clients, of which it warns."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", WORK)
def test_works_alike_under_both_engines(name: str, dtype: torch.dtype) -> None:
    task = WORK[name]()
    task.model.try_out(task.model.params(), task.test.x[:2])
    with warnings.catch_warnings():
        if name in SLOW_IN_TORCH:
            warnings.filterwarnings("ignore", "There is a performance drop")
        assert_engines_agree(task, dtype)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch-norm": (
        lambda: Residual(nn.BatchNorm2d),
        "layer 'norm' is a BatchNorm2d, whose running statistics average badly over clients: "
        "use nn.GroupNorm instead",
    ),
    "tracking-instance-norm": (
        lambda: Residual(lambda c: nn.InstanceNorm2d(c, track_running_stats=True)),
        "layer 'norm' (InstanceNorm2d) has the buffer 'running_mean'; buffers are not trained or "
        "averaged: use track_running_stats=False",
    ),
    "lstm": (
        lambda: nn.Sequential(nn.LSTM(8, 4, batch_first=True)),
        "layer '0' is a fused LSTM, which cannot be mapped over clients: "
        "use cells (nn.LSTMCell) instead",
    ),
    "gru": (
        lambda: nn.Sequential(nn.GRU(8, 4, batch_first=True)),
        "layer '0' is a fused GRU, which cannot be mapped over clients: "
        "use fedzmg.models.GRU instead",
    ),
    "attention-dropout": (
        lambda: Then(Attention(dropout=0.1)),
        "layer 'inner.attention' is a MultiheadAttention with dropout inside, whose masks have no "
        "address: set its dropout to 0; nn.Dropout layers around it are fine",
    ),
    "encoder-default": (
        lambda: Then(encoder(batch_first=True)),
        "layer 'inner.self_attn' is a MultiheadAttention with dropout inside, whose masks have no "
        "address: set its dropout to 0; nn.Dropout layers around it are fine",
    ),
    "spectral-norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3))),
        "layer '0.parametrizations.weight.0' (_SpectralNorm) has the buffer '_u'; buffers are not "
        "trained or averaged: leave the layer out, or make it a plain attribute if it never "
        "changes",
    ),
    "weight-norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 3))),
        f"parameter '{WEIGHT_NORM}0' belongs to a ParametrizationList, whose input axes are "
        f"unknown: name them with axes={{'{WEIGHT_NORM}0': (...)}}, or () to leave it unprojected",
    ),
    "tied": (
        Tied,
        "parameter 'head.weight' is tied to 'embedding.weight', which has other input axes: "
        "name them with axes={'embedding.weight': (...)}",
    ),
    "own-parameter": (
        Own,
        "parameter 'gain' belongs to a Own, whose input axes are unknown: "
        "name them with axes={'gain': (...)}, or () to leave it unprojected",
    ),
    "channel-dropout": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.Dropout2d(0.5)),
        "layer '1' is a Dropout2d, which has no addressed version: use nn.Dropout",
    ),
    "padding-index": (
        lambda: nn.Sequential(nn.Embedding(11, 3, padding_idx=0)),
        "layer '0' is an Embedding with padding_idx or max_norm, which do not map over clients: "
        "leave them out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_and_remedy(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InputError) as caught:
        FunctionalModel(make())
    assert str(caught.value) == message


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_old_weight_norm_is_refused() -> None:
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 3)))
    with pytest.raises(InputError, match=r"parameter '0.weight_g' belongs to a Linear"):
        FunctionalModel(module)
    with pytest.raises(InputError, match=r"cannot be copied.*use torch.nn.utils.parametrizations"):
        FunctionalModel(module, {"0.weight_g": (), "0.weight_v": (1,)})


def test_attention_over_the_batch_is_refused() -> None:
    """The default of torch's encoders: without batch_first, examples attend to each other."""
    model = FunctionalModel(Then(encoder(dropout=0.0)))
    with pytest.raises(InputError, match=r"depend on the other examples.*batch_first=True"):
        model.try_out(model.params(), torch.from_numpy(SEQUENCES[:2]))


def one_round(module: nn.Module, engine: str) -> None:
    simulate(federation(module, VECTORS, LABELS), [Trial.of("fedzmg")], rounds=1, engine=engine)  # type: ignore[arg-type]


def test_a_branch_on_data_names_the_other_engine() -> None:
    module = Branch(lambda x, out: x)
    with pytest.raises(InputError) as caught:
        one_round(module, "vectorized")
    assert str(caught.value) == (
        "the model decides by the value of a tensor (if, float(), .item()), which cannot be "
        "mapped over clients: use torch.where, or engine='sequential'"
    )
    one_round(module, "sequential")


def test_functional_dropout_names_the_layer() -> None:
    with pytest.raises(InputError) as caught:
        one_round(FunctionalDropout(), "vectorized")
    assert str(caught.value) == (
        "the model draws random numbers by itself, which have no address and cannot be repeated: "
        "use layers (nn.Dropout, fedzmg.models.RandomFlip) instead of F.dropout and the like"
    )
