"""Small networks: those of the embedded tasks, and what a first experiment needs."""

from __future__ import annotations

from torch import Tensor, nn

from fedzmg.models.recurrent import GRU


def logistic_regression(inputs: int, outputs: int) -> nn.Sequential:
    """One dense layer on flattened inputs."""
    return mlp(inputs, outputs=outputs)


def mlp(inputs: int, *hidden: int, outputs: int) -> nn.Sequential:
    """Fully connected ReLU network on flattened inputs."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in zip((inputs, *hidden), hidden, strict=False):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], outputs))


def digits_cnn(outputs: int = 10) -> nn.Sequential:
    """Two strided convolutions and two dense layers for 28x28 images, 52,266 parameters."""
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
        """Logits of the character after each position."""
        out: Tensor = self.dense(self.gru(self.embedding(tokens)))
        return out
