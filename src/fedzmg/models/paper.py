"""The three networks of the FedZMG paper, with exactly its numbers of parameters.

The paper trained them in Keras, which keeps channels last and flattens in that order. Here
channels come first. The first dense kernel's columns are therefore a permutation of Keras's rows;
its entries start alike in law and are projected over all of them, so training is the same in law.
Start them with ``init="keras"``.
"""

from __future__ import annotations

from torch import nn

from fedzmg.models.networks import CharGRU


def emnist_cnn(outputs: int = 62) -> nn.Sequential:
    """Two 5x5 convolutions and two dense layers; input ``(n, 28, 28)``.

    1,690,046 parameters; 1,663,370 with ten outputs.
    """
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
    """Four 3x3 convolutions, two dense layers and dropout; input ``(n, 3, 32, 32)``.

    2,214,532 parameters.
    """
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
    """Embedding of 256, GRU of 1024 units, 66 outputs per position; input ``(n, time)`` ids.

    4,022,850 parameters: the GRU has two bias vectors, as Keras's with ``reset_after=True``.
    """
    return CharGRU(66, 256, 1024)
