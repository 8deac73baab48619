"""FedMuon (Liu et al. 2025, arXiv 2510.27403): orthogonalised momentum on the clients.

With ``M`` the server's momentum and ``D`` its last step, zero at first, and ``K`` local steps::

    client:  m   <- M                            at the start of the round
             m   <- beta m + (1 - beta) g
             u   <- beta m + (1 - beta) g        (nesterov; plain: u = m)
             q   <- lr (1 - alpha) scale
             w_k <- (1 - q decay) w_k - q sqrt(max(1, rows/columns)) O(u) - alpha D / K
    server:  D   <- mean_k (w - w_k) ;   M <- mean_k m ;   w <- w - D

``O(u)`` brings all singular values of a matrix near 1: five Newton-Schulz steps, or exactly
(``client.orthogonal = "polar"``, by a singular value decomposition). These are the equations of
matrices, that is of parameters with two axes or more, as ``(first axis, all others)``. Vectors get
AdamW (0.9, 0.95, eps 1e-10) with learning rate ``lr (1 - alpha)`` from a new state every round, and
the same ``alpha D / K``. If lr changes between rounds, D is scaled along. ``client.matrices =
"hidden"`` leaves embeddings and the last layer to AdamW, as Muon's authors advise.
Defaults of alpha, beta and decay are the authors'; they use ``lr = 0.03, scale = 0.5`` for a ResNet
and ``lr = 0.0003, scale = 10`` for transformers.

Travels down: the model, M and D. Travels up: the model difference and m. Both moments of vectors
are zero in messages. Server state: M and D. Weights are uniform. ``fedmuon:local`` is Muon on every
client alone, from a momentum of zero: only the model travels.

Differences from the paper: where its quoted equations and its code differ, this follows the code
(averaging momentum, Nesterov, Newton-Schulz), in the model's precision, not bfloat16. The factor of
the shape uses the flattened kernel, K is the client's own. Other algorithms have the same name.
Degenerate cases: ``alpha = 0`` from a momentum of zero is ``fedmuon:local``. A momentum of zero
gives no step. Orthogonalising keeps column sums of zero: inside ``ZeroMean``, and without decay,
the sum of every column is conserved.
"""

from dataclasses import field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import Average
from fedzmg.algorithms.moments import Moments, SharesState
from fedzmg.contract import Algorithm, ClientRule, Layout, Need, Number, choice, number, rule_class
from fedzmg.messages import ClientContext, Cohort, FullPass, Result, Stepped, Upload
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import Wrapper, known


def newton_schulz(matrix: Tensor) -> Tensor:
    """Bring the singular values of a matrix near 1 by five steps of a polynomial."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def polar(matrix: Tensor) -> Tensor:
    """Set the singular values of a matrix to 1; a zero matrix stays zero."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    exact: Tensor = left @ right
    return torch.where((matrix != 0).any(), exact, torch.zeros_like(matrix))


@rule_class
class Muon(ClientRule):
    """Momentum with orthogonalised steps for matrices, AdamW for vectors."""

    lr: Number = number(0.03, above=0, doc="client learning rate")
    scale: Number = number(1.0, above=0, doc="factor of the learning rate of matrices")
    beta: Number = number(0.98, low=0, below=1, doc="decay of the momentum of matrices")
    decay: Number | None = number(None, low=0, doc="decoupled weight decay, times lr per step")
    form: str = choice("nesterov", "plain", doc="form of the momentum")
    orthogonal: str = choice("newton_schulz", "polar", doc="way to orthogonalise")
    matrices: str = choice("all", "hidden", doc="all, or no embeddings and no last layer")
    spared: tuple[str, ...] | None = field(default=None, repr=False, metadata={"derived": True})
    """Names of the matrices that are treated as vectors, once the model is known."""

    def for_layout(self, layout: Layout) -> Self:
        if self.matrices == "all":
            return self
        owners = {name: name.rpartition(".")[0] for name in layout}
        last = [owners[name] for name, info in layout.items() if info.input_axes][-1:]
        spared = (n for n, info in layout.items() if info.role == "embedding" or owners[n] in last)
        return replace(self, spared=tuple(spared))

    def is_matrix(self, name: str, leaf: Tensor) -> bool:
        """Tell whether a parameter's steps are orthogonalised."""
        spared = () if self.matrices == "all" else known(self, self.spared)
        return leaf.ndim > 1 and name not in spared

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> Moments:
        zeros = context.params.zeros()
        none = next(iter(zeros.values())).new_zeros(())
        second = {n: none if self.is_matrix(n, leaf) else leaf for n, leaf in zeros.items()}
        return Moments(zeros, Tree(second), none)

    def step(self, context: ClientContext, params: Tree, scratch: Moments, grad: Tree) -> Stepped:
        steps, moved = scratch.steps + 1, {}
        first, second = dict(scratch.first.items()), dict(scratch.second.items())
        for name, leaf in params.items():
            slope, rate = grad[name], self.lr
            if self.is_matrix(name, leaf):
                first[name] = self.beta * first[name] + (1 - self.beta) * slope
                step = self._orthogonal(first[name], slope)
                rate = self.lr * self.scale
            else:
                first[name] = 0.9 * first[name] + 0.1 * slope
                second[name] = 0.95 * second[name] + 0.05 * slope * slope
                root = (second[name] / (1 - 0.95**steps)).sqrt() + 1e-10
                step = first[name] / (1 - 0.9**steps) / root
            kept = leaf if self.decay is None else leaf * (1 - rate * self.decay)
            moved[name] = kept - rate * step
        return Tree(moved), Moments(Tree(first), Tree(second), steps)

    def _orthogonal(self, momentum: Tensor, grad: Tensor) -> Tensor:
        mixed = self.form == "nesterov"
        u = self.beta * momentum + (1 - self.beta) * grad if mixed else momentum
        matrix = u.flatten(1)
        rows, columns = matrix.shape
        found = newton_schulz(matrix) if self.orthogonal == "newton_schulz" else polar(matrix)
        factor: float = max(1.0, rows / columns) ** 0.5
        return factor * found.reshape(u.shape)


class SharedMuon(NamedTuple):
    """Server state: the cohort's mean momentum, its last step, and the learning rate of that."""

    momentum: Tree
    step: Tree
    lr: Tensor


@rule_class
class Aligned(Wrapper):
    """Muon from the server's momentum, aligned with the server's last step."""

    pairing = "fedmuon"

    inner: Muon
    alpha: Number = number(0.5, low=0, below=1, doc="share of the server's last step")

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs | {"steps"}

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> Moments:
        return self.inner.begin(context, full_pass)._replace(first=context.shared.momentum)

    def step(self, context: ClientContext, params: Tree, scratch: Moments, grad: Tree) -> Stepped:
        lr, shared = self.inner.lr, context.shared
        slower = replace(self.inner, lr=lr * (1 - self.alpha))
        params, scratch = slower.step(context, params, scratch, grad)
        share = self.alpha * lr / shared.lr / context.steps.to(shared.lr.dtype)
        return params - share * shared.step, scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        is_matrix, first = self.inner.is_matrix, scratch.first.items()
        momentum = {n: w if is_matrix(n, w) else torch.zeros_like(w) for n, w in first}
        lr = torch.ones_like(context.shared.lr) * self.inner.lr
        return Upload(context.params - params, average=(Tree(momentum), lr)), context.memory


@rule_class
class FedMuonServer(SharesState):
    """The average of models and momenta, which sends its last step along."""

    pairing = "fedmuon"

    def init(self, params: Tree) -> SharedMuon:
        one = next(iter(params.values())).new_ones(())
        return SharedMuon(params.zeros(), params.zeros(), one)

    def update(self, params: Tree, state: SharedMuon, cohort: Cohort) -> tuple[Tree, SharedMuon]:
        momentum, lr = cohort.average
        return params - cohort.delta, SharedMuon(momentum, cohort.delta, lr)


ALGORITHMS = (
    Algorithm("fedmuon", Aligned(Muon(decay=0.01)), FedMuonServer(), weights="uniform"),
    Algorithm("fedmuon:local", Muon(decay=0.01), Average(), weights="uniform"),
)
