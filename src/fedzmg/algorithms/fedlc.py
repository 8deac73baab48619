"""FedLC (Zhang et al. 2022): logits calibrated by how often a client has each class.

With ``n_c`` the client's own examples of class c, over its whole training data::

    s_c  = logit_c - tau n_c^(-1/4)
    loss = -s_y + log sum_c e^(s_c)
    client:  w_k <- w_k - lr g                       (momentum and decay as options)
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Evaluation uses the plain logits. A class that the client does not have has an infinite margin: it
is left out of the sum, and its logit gets no gradient. ``client.absent = "counted"`` gives it the
margin of a class with one example instead. Counts are not frequencies, so the effect shrinks with
more data: margins are 1, 0.56, 0.32, 0.18 for 1, 10, 100, 1000 examples.

Travels down: the model. Travels up: the model difference. State: none.
Only for tasks with one class per example.
Differences from the paper: the printed sum leaves out the true class, which makes the loss
unbounded below; all three implementations we read sum over every class. The paper gives no value of
tau; users try 0.1 to 1.
Degenerate cases: ``tau = 0`` is FedAvg if no class is absent, and so are equal counts of all
classes.
"""

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Need, Number, choice, number, rule_class
from fedzmg.messages import BatchOutputs, ClientContext
from fedzmg.models.objective import cross_entropy
from fedzmg.wrappers.wrapper import Wrapper


@rule_class
class CalibratedLogits(Wrapper):
    """Any client rule, on the cross-entropy of calibrated logits."""

    own_loss = True

    tau: Number = number(1.0, low=0, doc="strength of the calibration")
    absent: str = choice("masked", "counted", doc="absent classes: left out, or as if present once")

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs | {"label_counts"}

    def loss(self, context: ClientContext, batch: BatchOutputs) -> Tensor:
        counts = context.label_counts
        scores = batch.outputs - self.tau * counts.clamp(min=1).to(batch.outputs.dtype) ** -0.25
        if self.absent == "masked":
            scores = torch.where(counts > 0, scores, -torch.inf)
        return super().loss(context, batch._replace(losses=cross_entropy(scores, batch.targets)))


ALGORITHMS = (Algorithm("fedlc", CalibratedLogits(SGD(lr=0.1)), Average()),)
