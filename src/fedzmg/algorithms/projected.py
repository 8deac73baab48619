"""A server step that is zero-mean per output unit, whatever the rule inside makes of the update.

::

    w'  <- inner(w, updates)
    w   <- w + (w' - w) - mean(w' - w over the layer's inputs)       for every weight

An element-wise preconditioner (Adam, Yogi, Adagrad) turns zero-mean updates into a step that is
not. The authors of Gradient Centralization (Yong et al. 2020) advise to centre the final step of
adaptive optimisers, so that the mean of the weights is kept; this does so on a server.

Travels and state: as the rule inside.
Degenerate cases: around a plain average it is Global GC; on clients without decay that already
centre, it changes nothing around an average or server momentum. The sum of every column is
conserved, so a decay of that sum on clients is undone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self, final

from torch import Tensor

from fedzmg.algorithms.projection import (
    Axes,
    Biases,
    EmbeddingAxis,
    check_projection,
    projected_axes,
    zero_mean,
)
from fedzmg.contract import Cohort, Layout, ServerRule, State
from fedzmg.errors import InputError
from fedzmg.tree import Tree


@final
@dataclass(frozen=True)
class Projected(ServerRule):
    """Any server rule, its final step centred over the inputs of every layer."""

    inner: ServerRule
    axes: Axes | None = field(default=None, repr=False, metadata={"derived": True})
    embedding_axis: EmbeddingAxis = "vocab"
    biases: Biases = "free"

    def __post_init__(self) -> None:
        """Refuse a projection that is not known."""
        super().__post_init__()
        check_projection(embedding_axis=self.embedding_axis, biases=self.biases)

    def for_layout(self, layout: Layout) -> Self:
        axes = projected_axes(layout, "all", self.embedding_axis, self.biases)
        return replace(self, inner=self.inner.for_layout(layout), axes=axes)

    def init(self, params: Tree) -> State:
        return self.inner.init(params)

    def share(self, state: State) -> State:
        return self.inner.share(state)

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        if self.axes is None:
            raise InputError("Projected does not know the model yet: call for_layout(layout) first")
        after, state = self.inner.update(params, state, cohort)
        known = self.axes

        def moved(name: str, leaf: Tensor) -> Tensor:
            if not known[name]:
                return leaf  # as it is, because taking the step apart and adding it again rounds
            return params[name] + zero_mean(leaf - params[name], known[name])

        return Tree({name: moved(name, leaf) for name, leaf in after.items()}), state
