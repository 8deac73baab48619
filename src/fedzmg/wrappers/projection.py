"""The zero-mean projection of gradients and steps, and the axes of each parameter."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedzmg.contract import Layout
from fedzmg.models.layout import warn_of_unknown
from fedzmg.tree import Tree

Project = Literal[
    "all", "no_embedding", "conv_only", "dense_only", "first_layer", "all_but_first",
    "all_but_last", "whole", "none",
]  # fmt: skip
EmbeddingAxis = Literal["vocab", "dim"]
Biases = Literal["free", "centred"]
Axes: TypeAlias = Mapping[str, tuple[int, ...]]


def zero_mean(grad: Tensor, input_axes: tuple[int, ...]) -> Tensor:
    """Project a gradient onto the hyperplane of zero mean over ``input_axes``.

    >>> zero_mean(torch.tensor([[1.0, 3.0, 5.0], [2.0, -4.0, 8.0]]), (1,))
    tensor([[-2.,  0.,  2.],
            [ 0., -6.,  6.]])
    """
    if not input_axes:
        return grad
    return grad - grad.mean(dim=input_axes, keepdim=True, dtype=_wide(grad)).to(grad.dtype)


def zero_mean_vector(grad: Tree) -> Tree:
    """Project a gradient onto zero mean over all of its entries, the model as one vector."""
    total = torch.stack([leaf.sum(dtype=_wide(leaf)) for leaf in grad.values()]).sum()
    mean = total / sum(leaf.numel() for leaf in grad.values())
    return grad.map(lambda leaf: leaf - mean.to(leaf.dtype))


def _wide(grad: Tensor) -> torch.dtype:
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype


def projected_axes(
    layout: Layout, project: Project = "all", embedding_axis: EmbeddingAxis = "vocab",
    biases: Biases = "free",
) -> Axes:  # fmt: skip
    """Return the axes over which a parameter is centred (a bias with its layer); ``()``: none."""
    if project in ("all", "no_embedding", "all_but_first", "all_but_last"):
        warn_of_unknown(layout)

    def owner(name: str) -> str:
        return name.rpartition(".")[0]

    layers = [owner(name) for name, info in layout.items() if info.input_axes]
    axes: dict[str, tuple[int, ...]] = {}
    for name, info in layout.items():
        chosen = {
            "all": True, "no_embedding": info.role != "embedding",
            "conv_only": "Conv" in info.layer, "dense_only": "Linear" in info.layer,
            "first_layer": owner(name) in layers[:1],
            "all_but_first": owner(name) not in layers[:1],
            "all_but_last": owner(name) not in layers[-1:],
        }  # fmt: skip
        over = info.input_axes
        if info.role == "embedding" and embedding_axis == "dim":
            over = (1,)
        # The last axis of a bias is its only one. A parameter without a layer's type has axes that
        # the user named; they take precedence.
        if info.role in ("bias", "norm") and info.layer and biases == "centred":
            over = (-1,)
        axes[name] = over if chosen.get(project) else ()
    return axes
