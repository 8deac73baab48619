"""FedZMG's clients with an adaptive server; named as future work by Zantalis et al. 2026.

::

    client:  FedZMG's: zero-mean gradients, momentum, decoupled decay
    server:  the step of FedAdam, FedYogi or FedAdagrad, in the form of TensorFlow Federated
    :projected   that step, centred per output unit over the layer's inputs

The combinations are ours, of published equations. Clients without decay send zero-mean updates, but
a server that divides every coordinate by its own root makes a step that is not zero-mean. The
projected versions centre that step and conserve the sum of every column.

Travels down: the model. Travels up: the model difference. Server state: that of the server rule.
Clients' decay enters the server's moments, and a projected step undoes its effect on column sums.
``server.decay`` with ``client.decay = 0`` avoids both: it shrinks the model after the step.
Degenerate cases: ``client.project = "none"`` without momentum and decay is the server's own
algorithm; with one input per output unit a projected weight never moves.
"""

from fedzmg.algorithms.fedadagrad import Adagrad
from fedzmg.algorithms.fedadam import Adam
from fedzmg.algorithms.fedyogi import Yogi
from fedzmg.algorithms.fedzmg import CLIENT
from fedzmg.contract import Algorithm
from fedzmg.wrappers.wrapper import Projected

ALGORITHMS = (
    Algorithm("fedzmg-adam:projected", CLIENT, Projected(Adam())),
    Algorithm("fedzmg-yogi", CLIENT, Yogi()),
    Algorithm("fedzmg-yogi:projected", CLIENT, Projected(Yogi())),
    Algorithm("fedzmg-adagrad", CLIENT, Adagrad()),
    Algorithm("fedzmg-adagrad:projected", CLIENT, Projected(Adagrad())),
)
