"""A small transformer for text, of layers that map over clients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg.errors import InputError


class _Attention(nn.Module):
    """Causal attention: every position reads itself and those before it.

    Written as matrix products and a softmax: torch's fused attention does not map over clients.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        place = torch.arange(x.shape[-2], device=x.device)
        scores = scores.masked_fill(place > place[:, None], -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2)
        out: Tensor = self.out(mixed)
        return out

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
        out: Tensor = x + self.drop2(self.narrow(F.gelu(self.wide(self.norm2(x)))))
        return out


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
            raise InputError(
                f"a sequence of {time} characters for a model of length {longest}: "
                "cut the sequences or make the model longer"
            )
        places = self.places(torch.arange(time, device=tokens.device))
        out: Tensor = self.dense(self.norm(self.blocks(self.tokens(tokens) + places)))
        return out
