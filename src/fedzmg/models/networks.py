"""Networks of the embedded tasks and of the FedZMG paper, and common ones for experiments.

The paper trained its networks in Keras, which keeps channels last and flattens in that order. Here
channels come first. The first dense kernel's columns are therefore a permutation of Keras's rows;
its entries start alike in law and are projected over all of them, so training is the same in law.
Start the paper's networks with ``init="keras"``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models.layer_swaps import GRU


def logistic_regression(inputs: int, outputs: int) -> nn.Sequential:
    """Build one dense layer on flattened inputs."""
    return mlp(inputs, outputs=outputs)


def mlp(inputs: int, *hidden: int, outputs: int) -> nn.Sequential:
    """Build a fully connected ReLU network on flattened inputs."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in zip((inputs, *hidden), hidden, strict=False):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], outputs))


def digits_cnn(outputs: int = 10) -> nn.Sequential:
    """Build two strided convolutions and two dense layers for 28x28 images, 52,266 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )


class CharGRU(nn.Module):
    """Next-character model: embedding, GRU, dense; outputs logits ``(batch, time, vocabulary)``."""

    def __init__(self, vocabulary: int, embedding: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.gru = GRU(embedding, units)
        self.dense = nn.Linear(units, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.dense(self.gru(self.embedding(tokens)))
        return out


def emnist_cnn(outputs: int = 62) -> nn.Sequential:
    """Build the paper's CNN for EMNIST ``(n, 28, 28)``: 1,690,046 parameters with 62 outputs."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, outputs),
    )


def cifar100_cnn(outputs: int = 100) -> nn.Sequential:
    """Build the paper's CNN for CIFAR-100 ``(n, 3, 32, 32)``: 2,214,532 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 512),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(512, outputs),
    )


def shakespeare_gru() -> CharGRU:
    """Build the paper's GRU for text: embedding of 256, 1024 units, 66 outputs per position.

    4,022,850 parameters: the GRU has two bias vectors, as Keras's with ``reset_after=True``.
    """
    return CharGRU(66, 256, 1024)


class _Block(nn.Module):
    """Two 3x3 convolutions around which the input passes by."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(groups, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.shortcut(x))


class _Mean(nn.Module):
    """Average over all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def resnet18_gn(outputs: int, channels: int = 3, width: int = 64, groups: int = 2) -> nn.Sequential:
    """Build a ResNet-18 for images ``(n, channels, height, width)``, without batch statistics.

    The first convolution is 3x3 without stride or pooling, as is usual for 32x32 images. Two
    groups are usual in federated learning. 11,173,962 parameters with ten outputs.

    Args:
        outputs: classes.
        channels: 3 for colour.
        width: channels of the first stage; the later ones have 2, 4 and 8 times as many.
        groups: groups of channels that are normalised together; must divide ``width``.
    """
    if groups < 1 or width % groups:
        raise InputError(f"groups = {groups}: expected a divisor of width = {width}")
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.GroupNorm(groups, width),
        nn.ReLU(),
    ]
    now = width
    for stage in range(4):
        wide = width * 2**stage
        layers.append(_Block(now, wide, 1 if stage == 0 else 2, groups))
        layers.append(_Block(wide, wide, 1, groups))
        now = wide
    return nn.Sequential(*layers, _Mean(), nn.Linear(now, outputs))
