"""FedBABU (Oh et al. 2022): the body is trained together, the head is not trained at all.

::

    client:  phi_k <- phi_k - lr g           the head keeps its initial values
    server:  phi   <- phi - server_lr sum_k p_k (phi - phi_k)

Travels down: phi. Travels up: the difference of phi. State: none. Every client is meant to
fine-tune the model: compare clients after fine-tuning.
``parts.frozen`` says which layers are frozen: ``last:1``, the last one, by default.

Differences from the authors' code: weights are examples, not uniform. The code sets the head's
learning rate to zero. Here the head is not a part of the gradient: momentum and decay cannot move
it.
Degenerate cases: with no frozen layer it is FedAvg.
"""

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Parts

ALGORITHMS = (Algorithm("fedbabu", SGD(), Average(), parts=Parts(frozen=("last:1",))),)
