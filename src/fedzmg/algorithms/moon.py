"""MOON (Li, He, Song 2021): features near the global model's, away from the client's last ones.

With ``z`` the features of an example, the inputs of the last layer, in the local model, the model
received (``z_glob``) and the client's own model at the end of its last round (``z_prev``)::

    p = cos(z, z_glob) ;   n = cos(z, z_prev)
    loss   = task loss - mu log(e^(p/T) / (e^(p/T) + e^(n/T)))
    client:  w_k <- w_k - lr g                       (momentum and decay as options)
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

The two other models run without dropout and without a gradient. A client that takes part for the
first time has no model of its own and trains on the task's loss alone. The paper's networks end in
a projection head (Linear, ReLU, Linear to 256) with the classifier on top of it; any model whose
outputs are those of its last layer works here.

Travels down: the model. Travels up: the model difference. Client state: its last local model. A
step costs two more forward passes.
Differences from the paper: none known in the loss, with one earlier model (``buffer`` of 1). In
its code a client that is first drawn after the first round is compared with a random network; here
it is not compared. Of a sequence, the positions are averaged.
Degenerate cases: ``mu = 0`` is FedAvg, and so is every client's first round. If both other models
are equal, the added loss is ``mu log 2``, with no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedzmg.algorithms.ditto import OwnModel, no_own_model
from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.algorithms.fedntd import per_example
from fedzmg.contract import Algorithm, ClientRule, Need, Number, chain, number, rule_class
from fedzmg.errors import InputError
from fedzmg.messages import BatchOutputs, ClientContext, Result
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import Wrapper


@rule_class
class Moon(Wrapper):
    """Any client rule without memory, on the task's loss and a contrast of features."""

    own_loss = True

    mu: Number = number(1.0, low=0, doc="weight of the contrast")
    temperature: Number = number(0.5, above=0, doc="divisor of the cosines")

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule in chain(self.inner):
            if type(rule).init_memory not in (ClientRule.init_memory, Wrapper.init_memory):
                raise InputError(f"Moon around {type(rule).__name__}: both keep client memory")

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs | {"features"}

    def init_memory(self, params: Tree) -> OwnModel:
        return no_own_model(params)

    def references(self, context: ClientContext) -> tuple[Tree, ...]:
        return context.params, context.memory.params, *super().references(context)

    def loss(self, context: ClientContext, batch: BatchOutputs) -> Tensor:
        there, before = batch.reference_features[:2]
        # A model of zeros stands in for a missing one; spectral norm divides it by zero.
        before = torch.where(context.memory.exists > 0, before, torch.zeros_like(before))
        near, far = (F.cosine_similarity(batch.features, z, -1) for z in (there, before))
        contrast = per_example(-F.logsigmoid((near - far) / self.temperature), batch.targets)
        added = torch.where(context.memory.exists > 0, contrast, torch.zeros_like(contrast))
        outputs, features = batch.reference_outputs[2:], batch.reference_features[2:]
        rest = batch._replace(reference_outputs=outputs, reference_features=features)
        return super().loss(context, rest) + self.mu * added

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, _ = super().finish(context, params, scratch, steps)
        return upload, context.memory.replaced(params)


ALGORITHMS = (Algorithm("moon", Moon(SGD(lr=0.1)), Average()),)
