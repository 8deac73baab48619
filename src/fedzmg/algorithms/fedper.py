"""FedPer (Arivazhagan et al. 2019): a common body, and a head of its own for every client.

With ``phi`` the shared part of the model and ``h_k`` the client's personal one::

    client:  (phi_k, h_k) <- (phi_k, h_k) - lr g         joint steps from (phi, h_k)
    server:  phi          <- phi - server_lr sum_k p_k (phi - phi_k)

Travels down: phi. Travels up: the difference of phi. Client state: h_k.
``parts.personal`` says which layers are personal: ``last:1``, the last one, by default.
``lg-fedavg`` (Liang et al. 2020) is the mirror image: the first layers are personal, and the last
ones shared, with uniform weights. Its authors begin with FedAvg on the whole model: train that
first, and give its model as the start of the task.

Differences from the paper: all personal heads start from the same initial values, where the paper
draws one per client.
Degenerate case: without a personal layer it is FedAvg. One layer at least must be shared.
"""

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Parts

ALGORITHMS = (
    Algorithm("fedper", SGD(), Average(), parts=Parts(personal=("last:1",))),
    Algorithm("lg-fedavg", SGD(), Average(), weights="uniform", parts=Parts(personal=("first:1",))),
)
