"""Published benchmarks of other systems: tasks of the same shapes, and the times that they print.

Examples are random, because speed does not depend on them. Networks and protocols are those of the
systems' own code. Sizes of clients that differ are drawn from a gamma distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from fedzmg.models import networks
from fedzmg.tasks.inputs import token_ids, unit_pixels
from fedzmg.tasks.task import Task


class CharLSTM(nn.Module):
    """Next-character model of FedML and FLUTE: embedding, two LSTM layers, dense."""

    def __init__(self, vocabulary: int = 90, embedding: int = 8, units: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, num_layers=2, batch_first=True)
        self.dense = nn.Linear(units, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.dense(self.lstm(self.embedding(tokens))[0])
        return out


def two_convolutions(channels: int, flat: int, outputs: int, *first: nn.Module) -> nn.Sequential:
    """Build the CNN of pfl-research's CIFAR-10 and of FLUTE's FEMNIST."""
    return nn.Sequential(
        *first, nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, outputs),
    )  # fmt: skip


def tutorial_cnn() -> nn.Sequential:
    """Build BlazeFL's CNN, which is that of PyTorch's tutorial."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), *networks.mlp(400, 120, 84, outputs=10),
    )  # fmt: skip


def imagenet_resnet18(outputs: int, *, batch_norm: bool = False) -> nn.Sequential:
    """Build a ResNet-18 with ImageNet's first layers, as FLUTE and BlazeFL use for 32x32 images."""
    _, norm, relu, *blocks = networks.resnet18_gn(outputs)
    stem = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    model = nn.Sequential(stem, norm, relu, nn.MaxPool2d(3, stride=2, padding=1), *blocks)
    for parent in list(model.modules()) if batch_norm else ():
        for name, child in parent.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(parent, name, nn.BatchNorm2d(child.num_channels))
    return model


def _task(
    model: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, scale: float = 1.0,
    *, clients: int, each: float, deviation: float = 0.0, tests: int, cohort: int, **protocol: Any,
) -> Task:  # fmt: skip
    """Build a task; ``scale`` is the share of clients, cohort and test examples, for a trial."""
    rng = np.random.default_rng(0)
    clients, cohort, tests = (max(2, round(scale * n)) for n in (clients, cohort, tests))
    sizes = np.full(clients, each)
    if deviation:
        sizes = rng.gamma((each / deviation) ** 2, deviation**2 / each, clients)
    sizes = np.maximum(1, sizes.round()).astype(int)

    def draw(count: int) -> tuple[Any, Any]:
        if len(shape) == 1:  # text: the targets are the next characters
            text = rng.integers(0, classes, (count, shape[0] + 1), dtype=np.uint8)
            return text[:, :-1], text[:, 1:].astype(np.int64)
        x = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        return x, rng.integers(0, classes, count)

    x, y = draw(int(sizes.sum()))
    return Task.from_arrays(
        model(), x, y, np.repeat(np.arange(clients), sizes), test=draw(tests), cohort=cohort,
        prepare=token_ids if len(shape) == 1 else unit_pixels, **protocol,
    )  # fmt: skip


class Benchmark(NamedTuple):
    """A published benchmark."""

    build: Callable[..., Task]
    """Builds the task; takes ``scale``."""
    rounds: int
    lr: float
    printed: str
    """Times as their authors print them."""
    source: str


PFL = "pfl-research, benchmarks/image_classification; arXiv 2404.06430 (A100)"
FLUTE = "FLUTE's README; GPUs not stated"
BLAZE = "BlazeFL, arXiv 2604.03606, read off its plots; GPU not known here"
CIFAR = (3, 32, 32)
_pfl = partial(
    _task, lambda: two_convolutions(3, 64 * 14 * 14, 10), CIFAR, 10, clients=1000, each=50,
    tests=10_000, cohort=50, batch_size=10, eval_every=10,
)  # fmt: skip
_blaze = {
    "clients": 100, "each": 500, "tests": 10_000, "cohort": 100, "batch_size": 50, "epochs": 5,
}  # fmt: skip

BENCHMARKS = {
    "pfl-cifar10": Benchmark(_pfl, 1500, 0.1, "", PFL),
    # Users have 50 images here, too; the time does not depend on their labels.
    "pfl-cifar10-dirichlet": Benchmark(_pfl, 3000, 0.1, "", PFL),
    "flute-mnist": Benchmark(
        # FedProx's split: 69,035 images, 69 ± 106 of a client, of which 9 in 10 train.
        partial(
            _task, lambda: networks.mlp(784, outputs=10), (28, 28), 10, clients=1000,
            each=62.1, deviation=95.4, tests=6904, cohort=10, batch_size=10, eval_every=20,
        ),
        100, 0.03, "FLUTE 1:35, FedML 3:09", FLUTE,
    ),
    "flute-femnist": Benchmark(
        # TFF's EMNIST; relative deviation of the FedZMG paper's clients, 236 ± 92.
        partial(
            _task, lambda: two_convolutions(1, 64 * 12 * 12, 62, nn.Unflatten(1, (1, 28))),
            (28, 28), 62, clients=3400, each=197.5, deviation=77.0, tests=77_483, cohort=10,
            batch_size=20, eval_every=50,
        ),
        1500, 0.1, "FLUTE 8:22, FedML 5:49:52", FLUTE,
    ),
    "flute-cifar100": Benchmark(
        partial(
            _task, lambda: imagenet_resnet18(100), CIFAR, 100, clients=500, each=100,
            tests=10_000, cohort=10, batch_size=20, eval_every=50,
        ),
        4000, 0.1, "FLUTE 1:42:01, FedML 15:55:36", FLUTE,
    ),
    "flute-shakespeare": Benchmark(
        # 16,068 and 2,356 speeches; in the plays' text, one has 2.27 sequences of 80 on average.
        partial(
            _task, CharLSTM, (80,), 90, clients=715, each=51.0, deviation=58.8, tests=5348,
            cohort=10, batch_size=4, eval_every=50,
        ),
        1200, 0.8, "FLUTE 21:50, FedML 6:46:21", FLUTE,
    ),
    "blazefl-cnn": Benchmark(
        partial(_task, tutorial_cnn, CIFAR, 10, **_blaze),
        5, 0.1, "BlazeFL about 30 s, Flower about 93 s", BLAZE,
    ),
    "blazefl-resnet18": Benchmark(
        partial(_task, lambda: imagenet_resnet18(10, batch_norm=True), CIFAR, 10, **_blaze),
        5, 0.1, "BlazeFL about 115 s, Flower about 160 s", BLAZE,
    ),
}  # fmt: skip
