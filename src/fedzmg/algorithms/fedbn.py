"""FedBN (Li, Jiang, Zhang, Kamp and Dou 2021): BatchNorm layers of its own for every client.

With ``phi`` the parameters outside of BatchNorm layers and ``b_k`` weights, biases and running
statistics of these layers::

    client:  (phi_k, b_k) <- (phi_k, b_k) - lr g         joint steps from (phi, b_k)
             running statistics of b_k follow the batches
    server:  phi          <- phi - server_lr sum_k p_k (phi - phi_k)

Travels down: phi. Travels up: the difference of phi. Client state: b_k.
Layers are found by their type, not by their name. Every other algorithm keeps these layers on the
client with ``Task.from_arrays(..., batch_norm="local")``.

Differences from the authors' code: weights are examples, not uniform; any cohort may be drawn. A
client that was never sampled has the initial layers.
Degenerate cases: a model without BatchNorm is refused; FedAvg trains it.
"""

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Parts

ALGORITHMS = (Algorithm("fedbn", SGD(), Average(), parts=Parts(personal=("batch_norm",))),)
