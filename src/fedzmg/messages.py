"""Values that engines pass to rules, and that rules return.

Sign of a client's result, everywhere: ``delta = w_global - w_local``, a pseudo-gradient.
"Nothing" is ``()``, never ``None``, so that every value maps over clients.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from fedzmg.tree import State, Tree

FullPassTiming = Literal["never", "start", "loss", "epochs"]
"""``start``: loss and gradient at the global model. ``loss``: the loss alone. ``epochs``: the loss
there and after each epoch."""


class FullPass(NamedTuple):
    """Loss and gradient over all of a client's data, dropout off, computed on request."""

    loss: Tensor
    grad: Tree  # empty unless the rule asks for ``start``: the loss alone is a third of the work


class Asked(NamedTuple):
    """Optional values of a context, each ``()`` unless the rule's ``needs`` name it."""

    client: Any = ()
    key: Any = ()
    steps: Any = ()
    label_counts: Any = ()


class ClientContext(NamedTuple):
    """Everything a client knows before it trains; constant during the round."""

    params: Tree  # model that the server sent
    shared: State  # everything else that it sent
    memory: State
    round: Tensor  # number of the round, from 1
    num_examples: Tensor
    asked: Any = ()  # an :class:`Asked`, whose fields can be read from the context itself

    @property
    def client(self) -> Any:
        """Number of the client, if the rule needs it."""
        return self.asked.client

    @property
    def key(self) -> Any:
        """Key for random numbers (:mod:`fedzmg.draw`), different for every client and round."""
        return self.asked.key

    @property
    def steps(self) -> Any:
        """Number of local steps that are planned."""
        return self.asked.steps

    @property
    def label_counts(self) -> Any:
        """Number of examples of each class."""
        return self.asked.label_counts


class BatchOutputs(NamedTuple):
    """Outputs of a batch for a rule's own loss, one row per example."""

    losses: Tensor  # losses of the task
    outputs: Tensor
    targets: Tensor
    features: Any = ()  # inputs of the last layer; ``()`` unless the rule's ``needs`` name them
    reference_outputs: tuple[Tensor, ...] = ()  # outputs of the rule's references, no dropout
    reference_features: tuple[Tensor, ...] = ()


class Upload(NamedTuple):
    """Message of one client to the server."""

    delta: Tree
    average: State = ()  # values to be averaged with the weights of the clients
    total: State = ()  # values to be summed
    each: State = ()  # values that the server sees client by client
    weight: Any = ()  # weight of the upload, in place of the number of examples


Stepped: TypeAlias = tuple[Tree, State]  # parameters and state after a local step
Result: TypeAlias = tuple[Upload, State]  # upload of a client, and its memory for the next time


class Rows(NamedTuple):
    """Model updates of one cohort for an aggregator, a row per client."""

    deltas: Tensor  # all parameters as one flat row each; zeros where the weight is zero
    weights: Tensor  # weights of the clients; zero: no update


class Cohort(NamedTuple):
    """Uploads of one round, merged over the clients that count."""

    delta: Tree
    average: State
    total: State
    size: Tensor
    population: Tensor
    round: Tensor
    each: State = ()  # uploaded values of every client, a row each; zeros without a valid upload
    valid: Any = ()  # flags of the clients with a valid upload; ``()`` if nothing needs rows
    clients: Any = ()  # numbers of the clients; ``()`` unless the rule's ``needs`` name ``client``
    key: Any = ()  # key for random numbers; ``()`` unless the rule's ``needs`` name it
