"""Server steps centred per output unit, around any server rule.

::

    w'  <- inner(w, updates)
    w   <- w + (w' - w) - mean(w' - w over the layer's inputs)       for every weight

An element-wise preconditioner (Adam, Yogi, Adagrad) turns zero-mean updates into a step that is not
zero-mean. The authors of Gradient Centralization (Yong et al. 2020) advise to centre the final step
of adaptive optimisers, so that the mean of the weights is kept. This rule does so on a server.

Travels and state: as the rule inside.
Degenerate cases: around a plain average it is Global GC; on clients without decay that already
centre, it changes nothing around an average or server momentum. The sum of every column is
conserved, so a decay of that sum on clients is undone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self, final, get_args

from torch import Tensor

from fedzmg.algorithms.projection import (
    Axes,
    Biases,
    EmbeddingAxis,
    projected_axes,
    zero_mean,
)
from fedzmg.algorithms.wrapper import ServerWrapper
from fedzmg.contract import Cohort, Layout, State, choice
from fedzmg.errors import InputError
from fedzmg.tree import Tree


@final
@dataclass(frozen=True)
class Projected(ServerWrapper):
    """Any server rule, its final step centred over the inputs of every layer."""

    axes: Axes | None = field(default=None, repr=False, metadata={"derived": True})
    embedding_axis: EmbeddingAxis = choice(
        *get_args(EmbeddingAxis), doc="axis of an embedding that counts as its inputs"
    )
    biases: Biases = choice(*get_args(Biases), doc="biases: left alone, or centred too")

    def for_layout(self, layout: Layout) -> Self:
        axes = projected_axes(layout, "all", self.embedding_axis, self.biases)
        return replace(self, inner=self.inner.for_layout(layout), axes=axes)

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        if self.axes is None:
            raise InputError("Projected does not know the model yet: call for_layout(layout) first")
        after, state = self.inner.update(params, state, cohort)
        known = self.axes

        def moved(name: str, leaf: Tensor) -> Tensor:
            if not known[name]:
                return leaf  # subtracting and adding params would round
            return params[name] + zero_mean(leaf - params[name], known[name])

        return Tree({name: moved(name, leaf) for name, leaf in after.items()}), state
