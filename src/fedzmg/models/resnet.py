"""ResNet-18 with group normalisation, for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedzmg.errors import InputError


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
        """Rectified sum of the convolved and the passing input."""
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.shortcut(x))


class _Mean(nn.Module):
    """Average over all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def resnet18_gn(outputs: int, channels: int = 3, width: int = 64, groups: int = 2) -> nn.Sequential:
    """ResNet-18 for images ``(n, channels, height, width)``, without batch statistics.

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
