"""FedZMG (Zantalis, Zervas, Koulouras 2026): zero-mean gradients on the clients.

::

    client:  g   <- g - mean(g over the layer's inputs)     for every weight, not for biases
             v   <- momentum v + g
             w_k <- w_k (1 - decay lr) - lr v
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. State: none.
Defaults are the paper's: momentum 0.9, decay 0.0005.

``client.project`` selects what is projected: ``all`` weights, ``no_embedding``, ``conv_only``,
``dense_only``, ``first_layer``, ``all_but_first``, ``all_but_last``, ``none``, or ``whole``: one
mean over the whole parameter vector, biases included, which the paper's theory analyses. An
embedding is a linear map of a one-hot vector, so its inputs are the vocabulary;
``client.embedding_axis = "dim"`` centres each token's vector instead. ``client.biases = "centred"``
treats a bias as one more column.

Differences from the paper: its pseudo-code has neither momentum nor a server learning rate, its
experiments have both; the form here is the one its experiments need.
Degenerate cases: without projection, momentum and decay it is FedAvg bit for bit. With ``decay=0``
the sum of every projected column is conserved through training; with decay it shrinks by
``1 - decay lr`` a step. ``conv_only`` in a model without convolutions and ``all_but_last`` in a
model of one layer project nothing.
"""

from dataclasses import field, replace
from typing import Self, get_args

from fedzmg.algorithms.fedadam import Adam
from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Layout, choice, rule_class
from fedzmg.messages import ClientContext
from fedzmg.tree import Tree
from fedzmg.wrappers import projection
from fedzmg.wrappers.projection import Axes, Biases, EmbeddingAxis, Project, zero_mean
from fedzmg.wrappers.wrapper import GradientWrapper, known


@rule_class
class ZeroMean(GradientWrapper):
    """Any client rule, on zero-mean gradients: ``inner`` sees the projected gradient."""

    wrapper_kind = "project"

    axes: Axes | None = field(default=None, repr=False, metadata={"derived": True})
    project: Project = choice(*get_args(Project), doc="layers whose gradients are projected")
    embedding_axis: EmbeddingAxis = choice(*get_args(EmbeddingAxis), doc="embedding's input axis")
    biases: Biases = choice(*get_args(Biases), doc="biases: left alone, or centred too")
    adapters: tuple[str, ...] = field(default=(), repr=False, metadata={"derived": True})
    """Names of the first factors of adapters, which start every round centred."""

    def for_layout(self, layout: Layout) -> Self:
        axes = projection.projected_axes(layout, self.project, self.embedding_axis, self.biases)
        own = tuple(name for name, info in layout.items() if info.role == "lora_A")
        return replace(super().for_layout(layout), axes=axes, adapters=own)

    def start(self, context: ClientContext) -> Tree:
        first = self.inner.start(context)
        if not self.adapters or self.project == "whole":
            return first
        # Gradients of B see the rows of A: centred ones, or W B would leave the hyperplane.
        own, axes = self.adapters, self.axes or {}
        return Tree({n: zero_mean(w, axes[n]) if n in own else w for n, w in first.items()})

    def changed(self, grad: Tree) -> Tree:
        axes = known(self, self.axes)
        if self.project == "whole":
            return projection.zero_mean_vector(grad)
        return Tree({name: zero_mean(leaf, axes[name]) for name, leaf in grad.items()})


CLIENT = ZeroMean(SGD(lr=0.1, momentum=0.9, decay=5e-4))

ALGORITHMS = Algorithm("fedzmg", CLIENT, Average()), Algorithm("fedzmg-adam", CLIENT, Adam())
