"""Networks of the embedded tasks and of the FedZMG paper, and common ones for experiments.

The paper trained its networks in Keras, with channels last. Here they come first, so the first
dense kernel's columns are a permutation of Keras's rows: training is the same in law. Start the
paper's networks with ``init="keras"``.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg.errors import InputError


def mlp(inputs: int, *hidden: int, outputs: int) -> nn.Sequential:
    """Build a fully connected ReLU network on flattened inputs."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in zip((inputs, *hidden), hidden, strict=False):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], outputs))


def _convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 0
) -> list[nn.Module]:
    """Build a padded convolution and a ReLU, with a normalisation of groups of channels between."""
    norm = [nn.GroupNorm(groups, outputs)] if groups else []
    return [nn.Conv2d(inputs, outputs, size, stride, padding=size // 2), *norm, nn.ReLU()]


def digits_cnn(outputs: int = 10) -> nn.Sequential:
    """Build two strided convolutions and two dense layers for 28x28 images, 52,266 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)), *_convolution(1, 8, 5, 2), *_convolution(8, 16, 3, 2),
        *mlp(16 * 7 * 7, 64, outputs=outputs),
    )  # fmt: skip


def emnist_cnn(outputs: int = 62) -> nn.Sequential:
    """Build the paper's CNN for EMNIST ``(n, 28, 28)``: 1,690,046 parameters with 62 outputs."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)), *_convolution(1, 32, 5), nn.MaxPool2d(2),
        *_convolution(32, 64, 5), nn.MaxPool2d(2), *mlp(64 * 7 * 7, 512, outputs=outputs),
    )  # fmt: skip


def cifar100_cnn(outputs: int = 100, groups: int = 0) -> nn.Sequential:
    """Build the paper's CNN for CIFAR-100 ``(n, 3, 32, 32)``: 2,214,532 parameters.

    With ``groups``, channels are normalised in so many groups after every convolution.
    """
    conv = partial(_convolution, size=3, groups=groups)
    return nn.Sequential(
        *conv(3, 32), *conv(32, 32), nn.MaxPool2d(2), nn.Dropout(0.25),
        *conv(32, 64), *conv(64, 64), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 512), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(512, outputs),
    )  # fmt: skip


class CharGRU(nn.Module):
    """Next-character model: embedding, GRU, dense; outputs logits ``(batch, time, vocabulary)``."""

    def __init__(self, vocabulary: int, embedding: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.gru = nn.GRU(embedding, units, batch_first=True)
        self.dense = nn.Linear(units, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dense(self.gru(self.embedding(tokens))[0])  # type: ignore[no-any-return]


def shakespeare_gru() -> CharGRU:
    """Build the paper's GRU for text, 4,022,850 parameters: two biases, as ``reset_after=True``."""
    return CharGRU(66, 256, 1024)


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input passes by."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            small = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(small, nn.GroupNorm(groups, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.shortcut(x))


class _Mean(nn.Module):
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
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()
    ]  # fmt: skip
    for stage, narrow in enumerate((1, 1, 2, 4)):
        now, wide = width * narrow, width * 2**stage
        layers.append(_ResidualBlock(now, wide, 1 if stage == 0 else 2, groups))
        layers.append(_ResidualBlock(wide, wide, 1, groups))
    return nn.Sequential(*layers, _Mean(), nn.Linear(8 * width, outputs))


class _Attention(nn.Module):
    """Causal attention of matrix products: torch's fused one does not map over clients."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        each = (layer(x) for layer in (self.query, self.key, self.value))
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in each)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        position = torch.arange(x.shape[-2], device=x.device)
        scores = scores.masked_fill(position > position[:, None], -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2)
        return self.out(mixed)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class _Block(nn.Module):
    """Attention and a dense network, each on normalised inputs that also pass by."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = _Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)
        self.drop1 = nn.Dropout(dropout)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.narrow(F.gelu(self.wide(self.norm2(x)))))  # type: ignore[no-any-return]


class CharTransformer(nn.Module):
    """Next-character decoder; outputs logits ``(batch, time, vocabulary)``.

    Args:
        vocabulary: number of ids.
        dim: width of a position.
        heads: attention heads; must divide ``dim``.
        layers: blocks of attention and dense network.
        length: the longest sequence.
        dropout: behind attention and dense network, in training.
    """

    def __init__(
        self, vocabulary: int, dim: int, heads: int, layers: int, length: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise InputError(f"heads = {heads}: expected a divisor of dim = {dim}")
        self.tokens = nn.Embedding(vocabulary, dim)
        self.places = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(_Block(dim, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.dense = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        time, longest = tokens.shape[-1], self.places.num_embeddings
        if time > longest:
            problem = f"a sequence of {time} characters for a model of length {longest}"
            raise InputError(f"{problem}: cut the sequences or make the model longer")
        places = self.places(torch.arange(time, device=tokens.device))
        return self.dense(self.norm(self.blocks(self.tokens(tokens) + places)))  # type: ignore[no-any-return]
