"""Layers that map over clients, and their swap for torch's in a private copy of a module.

Random numbers of a keyed layer depend on the step's key, the layer, the call and the place in the
batch. A client trained alone, mapped with others or padded to a longer batch draws the same
numbers. Image augmentation goes in front of a model:

>>> model = nn.Sequential(RandomShift(4), RandomFlip(), nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

Layers that torch cannot map over clients, or maps by a slow loop, change their class for one that
computes the same from operations that do map. Parameters and names stay.
"""

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList

from fedzmg.errors import InputError
from fedzmg.kernels import layers
from fedzmg.kernels.layers import RANGE, mapped
from fedzmg.models.keyed import Draws, Values, drop_path, dropout
from fedzmg.models.recurrent import RECURRENT, Recurrent

DROP_PATHS = {  # and the name of their probability
    "torchvision.ops.stochastic_depth.StochasticDepth": "p",
    "timm.layers.drop.DropPath": "drop_prob",
}
POWER_ITERATIONS = 15  # power method in a pass; torch does as many once and one at every step


class KeyedLayer(Draws, nn.Module):
    """A layer that draws random numbers in training.

    The functional model numbers the layers, fills in ``key`` at every step and sets ``calls`` to
    zero before every pass, so that a layer called twice in one pass draws twice.
    """

    key: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.calls = 0
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)


class KeyedDropout(KeyedLayer):
    """Replacement of ``nn.Dropout``, torchvision's ``StochasticDepth`` and timm's ``DropPath``."""

    def __init__(self, p: float, drop: Values = dropout) -> None:
        super().__init__()
        self.p, self.drop = p, drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self, x, self.p, self.training)


class RandomFlip(KeyedLayer):
    """Mirrors left and right with probability one half; input ``(n, ..., height, width)``."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        flipped = self.draw(x.shape[:1], x.device) >= RANGE // 2
        return torch.where(_per_example(flipped, x), x.flip(-1), x)


class RandomShift(KeyedLayer):
    """Moves images by up to ``pixels`` down or up and across; input ``(n, ..., height, width)``.

    The same as padding by ``pixels`` and cropping at random.

    Args:
        pixels: the largest move; every whole number from ``-pixels`` to ``pixels`` is as likely.
        edge: fill what comes into view with the nearest pixel instead of zero.
    """

    def __init__(self, pixels: int, *, edge: bool = False) -> None:
        super().__init__()
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 0:
            raise InputError(f"pixels = {pixels!r}: expected a whole number of at least 0")
        self.pixels, self.edge = pixels, edge

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.pixels == 0:
            return x
        bits = self.draw(torch.Size((len(x), 2)), x.device)
        moves = bits % (2 * self.pixels + 1) - self.pixels
        for move, axis in zip(moves.unbind(1), (-2, -1), strict=True):
            size = x.shape[axis]
            line = torch.arange(size, device=x.device)
            source = _per_example(move, x) + (line if axis == -1 else line[:, None])
            moved = x.gather(axis, source.clamp(0, size - 1).expand(x.shape))
            if not self.edge:
                moved = torch.where((source >= 0) & (source < size), moved, torch.zeros_like(x))
            x = moved
        return x

    def extra_repr(self) -> str:
        return f"pixels={self.pixels}, edge={self.edge}, layer={self.layer}"


def _per_example(values: Tensor, x: Tensor) -> Tensor:
    """Shape one value per example to go with the batch."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


class Bilinear(nn.Bilinear):
    """``nn.Bilinear`` as one sum of products."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        out = torch.einsum("...i,oij,...j->...o", input1, self.weight, input2)
        return out if self.bias is None else out + self.bias


class Conv2d(nn.Conv2d):
    """``nn.Conv2d`` that uses our GPU kernels also when it is compiled."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        compiling, zeros = torch.compiler.is_compiling(), self.padding_mode == "zeros"
        if zeros and (input.is_cuda if compiling else layers.uses_patches(input, weight)):
            form = self.stride, self.padding, self.dilation, self.groups
            if compiling:
                return layers.conv2d(input, weight, bias, *form)
            with torch._C.DisableTorchFunction():
                return layers.conv2d(input, weight, bias, *form)
        if not compiling:
            input, weight = layers.in_format(input), layers.in_format(weight)
        return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """``nn.Linear`` whose compiled gradient on a GPU has the memory layout of its weights."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and torch.compiler.is_compiling():
            return layers.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` whose row at ``padding_idx`` gets no gradient, mapped over clients, too."""

    def forward(self, input: Tensor) -> Tensor:
        if not mapped() or self.max_norm is not None:
            return super().forward(input)
        if input.device.type == "cpu" and not torch.compiler.is_compiling():
            # In a map, an id that is too large would read the next client's table.
            ids = input
            while is_batchedtensor(ids):
                ids = get_unwrapped(ids)
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
                raise IndexError(f"id out of range: the embedding has {self.num_embeddings} rows")
        if self.padding_idx is None:
            return super().forward(input)
        rows = F.embedding(input, self.weight)
        return torch.where((input == self.padding_idx)[..., None], rows.detach(), rows)


class EmbeddingBag(nn.EmbeddingBag):
    """``nn.EmbeddingBag`` that looks up, then reduces; bags given by offsets only in a loop."""

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        special = self.padding_idx is not None or self.max_norm or self.scale_grad_by_freq
        if input.ndim != 2 or offsets is not None or special:
            return super().forward(input, offsets, per_sample_weights)
        rows = F.embedding(input, self.weight)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[..., None]
        if self.mode == "max":
            return rows.amax(1)
        return rows.sum(1) if self.mode == "sum" else rows.mean(1)


class _SpectralNorm(parametrizations._SpectralNorm):
    """Torch's spectral norm without memory: every pass starts from the module's own vectors."""

    def forward(self, weight: Tensor) -> Tensor:
        if weight.ndim == 1:
            return super().forward(weight)
        matrix = self._reshape_weight_to_matrix(weight)
        left, right, fixed = self._u, self._v, matrix.detach()
        for _ in range(POWER_ITERATIONS * self.n_power_iterations):
            left = F.normalize(fixed @ right, dim=0, eps=self.eps)
            right = F.normalize(fixed.mT @ left, dim=0, eps=self.eps)
        return weight / (left @ (matrix @ right))


@torch.no_grad()
def settle_spectral_norms(module: nn.Module) -> None:
    """Update the vectors of torch's spectral norms to the weights, for evaluation."""
    for owner in module.train().modules():
        own = owner if isinstance(owner, ParametrizationList) else ()
        if any(isinstance(m, parametrizations._SpectralNorm) for m in own):
            for _ in range(POWER_ITERATIONS):
                owner()


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that forms its weights in a map, where the fused kernel fails."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, *rest: Any, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        forms = need_weights or mapped()
        out, weights = super().forward(query, key, value, key_padding_mask, forms, *rest, **options)
        return out, weights if need_weights else None


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    getattr(nn, kind.__name__): kind
    for kind in (Bilinear, Conv2d, Embedding, EmbeddingBag, Linear, MultiheadAttention, *RECURRENT)
} | {parametrizations._SpectralNorm: _SpectralNorm}
"""By exact type: a user's subclass keeps its forward pass. Names stay: models print as before."""


def swap_layers(module: nn.Module) -> tuple[str, ...]:
    """Replace layers in place; return the names of the keys that training needs."""
    keys: list[str] = []
    for prefix, parent in list(module.named_modules()):
        parent.__class__ = SWAPS.get(type(parent), type(parent))
        if isinstance(parent, nn.Embedding | nn.EmbeddingBag):
            parent.sparse = False  # the same gradient, which rules add to dense weights
        if isinstance(parent, Recurrent) and parent.dropout and parent.num_layers > 1:
            parent.between = nn.Dropout(parent.dropout)
        # Not named_children(), which leaves out a module that is used a second time.
        for name, child in list(parent._modules.items()):
            if (keyed := _keyed(child)) is not None:
                keyed.layer = len(keys)
                setattr(parent, name, keyed)
                keys.append(f"{prefix}.{name}.key".lstrip("."))
    return tuple(keys)


def _keyed(child: Any) -> KeyedLayer | None:
    """Build the replacement of a layer that draws random numbers."""
    if isinstance(child, KeyedLayer):
        return deepcopy(child)
    if isinstance(child, nn.Dropout):
        return KeyedDropout(child.p)
    kind = f"{type(child).__module__}.{type(child).__name__}"
    usual = kind in DROP_PATHS and getattr(child, "mode", "row") == "row"
    usual = usual and getattr(child, "scale_by_keep", True)
    return KeyedDropout(getattr(child, DROP_PATHS[kind]) or 0.0, drop_path) if usual else None
