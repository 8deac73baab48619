"""FedNTD (Lee et al. 2022): distillation of the global model's scores of the not-true classes.

With ``q`` and ``q_glob`` the softmax over all classes but the true one, at temperature tau, in the
local model and in the model received::

    loss   = task loss + beta tau^2 sum_c q_glob_c (log q_glob_c - log q_c)
    client:  w_k <- w_k - lr g                       (momentum and decay as options)
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

The sum is over all classes but the true one, which gets no gradient from it. The global
model runs without dropout and without a gradient.

Travels down: the model. Travels up: the model difference. State: none. Only for classification. A
step costs one more forward pass.
Differences from the paper: none known in the loss. Its code leaves open whether the global model
runs with dropout. Of a sequence, the positions are averaged.
Degenerate cases: ``beta = 0`` and two classes are FedAvg. Without dropout so is one local step,
because the term has no gradient while both models are equal.
"""

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.errors import InputError
from fedzmg.messages import BatchOutputs, ClientContext
from fedzmg.tree import Tree
from fedzmg.wrappers.wrapper import Wrapper


def check_classes(rule: object, batch: BatchOutputs) -> None:
    """Reject a task whose outputs are not one score per class."""
    scores, targets = batch.outputs, batch.targets
    if targets.is_floating_point() or scores.shape[:-1] != targets.shape or scores.shape[-1] < 2:
        raise InputError(
            f"{type(rule).__name__} needs one score per class and whole-number labels; this task "
            f"has outputs of shape {tuple(scores.shape)} and {targets.dtype} targets of shape "
            f"{tuple(targets.shape)}: choose a classification task or another algorithm"
        )


def per_example(values: Tensor, targets: Tensor) -> Tensor:
    """Average values over the positions of an example, padding left out."""
    if values.ndim == 1:
        return values
    if targets.is_floating_point() or targets.shape != values.shape:
        return values.flatten(1).mean(1)
    valid = (targets >= 0).flatten(1)
    return torch.where(valid, values.flatten(1), 0.0).sum(1) / valid.sum(1).clamp(min=1)


@rule_class
class NotTrueDistillation(Wrapper):
    """Any client rule, on the task's loss and the global model's scores of other classes."""

    own_loss = True

    beta: Number = number(1.0, low=0, doc="weight of the distillation")
    tau: Number = number(1.0, above=0, doc="temperature of the scores")

    def references(self, context: ClientContext) -> tuple[Tree, ...]:
        return context.params, *super().references(context)

    def loss(self, context: ClientContext, batch: BatchOutputs) -> Tensor:
        check_classes(self, batch)
        classes = torch.arange(batch.outputs.shape[-1], device=batch.outputs.device)
        others = classes != batch.targets.clamp(min=0)[..., None]

        def log_softmax(scores: Tensor) -> Tensor:
            without = torch.where(others, scores / self.tau, -torch.inf)
            # Zero instead of minus infinity at the true class, whose probability is zero.
            return torch.where(others, scores / self.tau - without.logsumexp(-1, True), 0.0)

        there, here = log_softmax(batch.reference_outputs[0]), log_softmax(batch.outputs)
        divergence = torch.where(others, there.exp() * (there - here), 0.0).sum(-1)
        outputs, features = batch.reference_outputs[1:], batch.reference_features[1:]
        rest = batch._replace(reference_outputs=outputs, reference_features=features)
        added = self.beta * self.tau**2 * per_example(divergence, batch.targets)
        return super().loss(context, rest) + added


ALGORITHMS = (Algorithm("fedntd", NotTrueDistillation(SGD(lr=0.1)), Average()),)
