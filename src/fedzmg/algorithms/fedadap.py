"""FedAdap (Kundroo and Kim 2023), inferred: clients lower their learning rate and stop early.

::

    client:  lr_k <- lr ;  bad <- 0 ;  best <- loss of the global model on the client's data
             after every epoch of SGD with lr_k, with l the client's loss at its model:
                 if l < best - min_delta:  best <- l ;  bad <- 0
                 else:                     lr_k <- factor lr_k ;  bad <- bad + 1
                 stop if bad >= patience
    server:  w <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. State: none; learning rate, best loss and
patience are reset every round. Losses are full passes over the client's data, dropout off: one
forward pass before training and one after every epoch. Saved epochs show in the steps of each
round's record.

Inferred: only a description by others could be read. It says that the learning rate falls when the
training loss does not fall below a threshold, that training ends early after some epochs without
improvement, and that only the model is sent. The reference loss, the time at which it is taken, the
reset in every round and all defaults are our choice. Clients that stop early move the weighted
average less, as clients with few steps do in FedAvg.
Degenerate cases: ``factor = 1`` with a patience above the number of epochs is FedAvg, bit for bit,
as is a single local epoch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import Average
from fedzmg.contract import Algorithm, ClientRule, Number, number, rule_class
from fedzmg.messages import ClientContext, FullPass, Stepped
from fedzmg.tree import State, Tree


class Progress(NamedTuple):
    """Current learning rate, lowest loss so far, and epochs since it was reached."""

    lr: Tensor
    best: Tensor
    bad: Tensor


@rule_class
class AdaptiveSGD(ClientRule):
    """SGD that lowers its learning rate after a bad epoch, and stops after some of them."""

    full_pass = "epochs"
    uses_epoch_end = True

    lr: Number = number(0.1, above=0, doc="client learning rate at the start of a round")
    factor: Number = number(0.5, above=0, high=1, doc="factor of lr after a bad epoch")
    patience: Number = number(2.0, low=1, doc="bad epochs in a row that end local training")
    min_delta: Number = number(1e-3, low=0, doc="fall of the loss that counts as progress")

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> Progress:
        assert isinstance(full_pass, FullPass), "engines compute it for full_pass = epochs"
        none = torch.zeros_like(full_pass.loss)
        return Progress(none + self.lr, full_pass.loss, none)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        return params - scratch.lr * grad, scratch

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        better = loss < scratch.best - self.min_delta
        after = Progress(
            torch.where(better, scratch.lr, self.factor * scratch.lr),
            torch.where(better, loss, scratch.best),
            torch.where(better, torch.zeros_like(scratch.bad), scratch.bad + 1),
        )
        return after, after.bad < self.patience


ALGORITHMS = (Algorithm("fedadap", AdaptiveSGD(), Average()),)
