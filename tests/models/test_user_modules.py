"""Modules as people write them: each trains alike under both engines, or is rejected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import assert_engines_agree, federation, ids, normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedzmg import Metric, Task
from fedzmg.errors import InputError
from fedzmg.models import FunctionalModel
from golden_problems import Net

IMAGES = normal(3, 8, 8)
VECTORS = normal(6)
SEQUENCES = normal(5, 8)
TEXT = ids(11, 6)


def then(inner: nn.Module, width: int = 8) -> nn.Module:
    """A module of sequences, and a dense layer on the mean over time."""
    return Net(lambda m, x: m.head(m.inner(x).mean(1)), inner=inner, head=nn.Linear(width, 3))


def recurrent(cell: type[nn.RNNCellBase]) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        state = None
        for now in x.unbind(1):
            state = m.cell(now, state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    return Net(run, cell=cell(8, 4), head=nn.Linear(4, 3))


def fused_attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        query = m.query(x)
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    return Net(run, query=nn.Linear(8, 8))


def residual(norm: Callable[[int], nn.Module]) -> nn.Module:
    return Net(
        lambda m, x: m.head(F.relu(x + m.norm(m.conv(x))).mean((2, 3))),
        conv=nn.Conv2d(3, 3, 3, padding=1),
        norm=norm(3),
        head=nn.Linear(3, 3),
    )


def tied() -> nn.Module:
    """A language model whose output layer is its embedding."""
    module: Any = Net(
        lambda m, x: m.head(torch.tanh(m.inner(m.embedding(x)))),
        embedding=nn.Embedding(11, 4),
        inner=nn.Linear(4, 4),
        head=nn.Linear(4, 11, bias=False),
    )
    module.head.weight = module.embedding.weight
    return module


def own() -> nn.Module:
    """A parameter of a module type that the library does not know."""
    gain = nn.Parameter(torch.ones(1, 6))
    return Net(lambda m, x: m.layer(x * m.gain), gain=gain, layer=nn.Linear(6, 3))


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
    "layer-norm-mlp": classify(
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.PReLU(8), nn.Linear(8, 3)), VECTORS
    ),
    "in-place-relu": classify(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), VECTORS
    ),
    "group-norm-residual": classify(residual(lambda c: nn.GroupNorm(1, c)), IMAGES),
    "instance-norm-affine": classify(
        residual(lambda c: nn.InstanceNorm2d(c, affine=True)), IMAGES
    ),
    "lstm-cell": classify(recurrent(nn.LSTMCell), SEQUENCES),
    "encoder-dropout": classify(
        then(encoder(batch_first=True, attention_dropout=0.0)), SEQUENCES
    ),
    "text-cnn": classify(
        nn.Sequential(
            nn.Embedding(11, 8), Net(lambda m, x: x.transpose(1, 2)), nn.Conv1d(8, 5, 3), nn.ReLU(),
            nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(5, 3),
        ),
        TEXT,
    ),
    "embedding-bag": classify(nn.Sequential(nn.EmbeddingBag(11, 8), nn.Linear(8, 3)), TEXT),
    "autoencoder": lambda: federation(
        Net(
            lambda m, x: m.up(torch.tanh(m.down(x))),
            down=nn.Conv2d(3, 4, 2, stride=2), up=nn.ConvTranspose2d(4, 3, 2, stride=2),
        ),
        IMAGES, IMAGES, loss=squared, metric=Metric("error", squared, False),
    ),
    "depthwise": classify(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 4, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        ),
        IMAGES,
    ),
    "tied": lambda: federation(tied(), TEXT, TEXT),
    "own-parameter": classify(own(), VECTORS),
    "bilinear": classify(
        Net(lambda m, x: m.pair(x[:, :3], x[:, 3:]), pair=nn.Bilinear(3, 3, 3)), VECTORS
    ),
    "plain-tensor": classify(
        Net(lambda m, x: m.layer(x @ m.mixing), layer=nn.Linear(6, 3), mixing=torch.eye(6) * 2),
        VECTORS,
    ),
    "dropout-twice": classify(
        Net(
            lambda m, x: m.second(m.drop(torch.relu(m.first(m.drop(x))))),
            first=nn.Linear(6, 6), second=nn.Linear(6, 3), drop=nn.Dropout(0.4),
        ),
        VECTORS,
    ),
    "weight-norm": lambda: federation(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)),
        VECTORS,
        init="given",
        axes={f"{WEIGHT_NORM}0": (), f"{WEIGHT_NORM}1": (1,)},
    ),
    "fused-attention": classify(then(fused_attention()), SEQUENCES),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_engines_agree(name: str) -> None:
    task = WORK[name]()
    task.model.try_out(task.model.params(), task.test.x[:2])
    with warnings.catch_warnings():
        if name in ("tied", "own-parameter"):
            warnings.filterwarnings("ignore", ".*projected")
        assert_engines_agree(task, torch.float64)


REJECTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no-parameter": (nn.ReLU, "requires_grad"),
    "frozen": (lambda: nn.Linear(3, 3).requires_grad_(False), "requires_grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_modules_are_rejected(name: str) -> None:
    make, message = REJECTED[name]
    with pytest.raises(InputError, match=message) as caught:
        FunctionalModel(make())
    assert "\n" not in str(caught.value)
