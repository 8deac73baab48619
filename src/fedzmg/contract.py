"""The contract between algorithms and engines; :mod:`fedzmg.messages` has the values they exchange.

An algorithm is a *client rule* and a *server rule*. A rule is a frozen dataclass: its fields are
its hyper-parameters, its methods are pure functions of trees. The same rule runs in a plain loop,
mapped over hundreds of clients, compiled, or in a deployed client; it never sees data, devices,
batches or other clients. Behaviour is added by wrapping a rule, never by subclassing one.
"""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from fedzmg.errors import InputError, check_names
from fedzmg.messages import (
    BatchOutputs,
    ClientContext,
    Cohort,
    FullPass,
    FullPassTiming,
    Result,
    Rows,
    Stepped,
    Upload,
)
from fedzmg.parts import Parts
from fedzmg.rule import (
    Layout,
    Number,
    ParamInfo,
    Rule,
    bind,
    chain,
    check_rule,
    choice,
    flag,
    inner_rules,
    map_rule,
    number,
    numbers,
    replace_in_chain,
    rule_class,
    structure,
    whole,
)  # fmt: skip
from fedzmg.tree import State, Tree

__all__ = [
    "Aggregator", "Algorithm", "AlgorithmInfo", "ClientRule", "Layout", "Need", "Number",
    "ParamInfo", "Parts", "Rule", "ServerRule", "bind", "chain", "check_rule", "choice", "flag",
    "inner_rules", "map_rule", "number", "numbers", "replace_in_chain", "rule_class", "structure",
    "whole",
]  # fmt: skip

Weights = Literal["examples", "uniform"]
WrapperKind = Literal["clip", "change", "project", "pull", "schedule", "parts"]
"""Effect of a wrapper on the rule inside: bound its gradients, change or project them, pull the
model somewhere, change its numbers from round to round, or show it a part of the model."""
Need = Literal["client", "key", "steps", "label_counts", "features"]
"""Values that a rule gets only if it asks for them; a value not asked for is ``()``."""


class ClientRule(Rule, ABC):
    """Base of client rules. Only :meth:`step` is abstract.

    Order of calls: :meth:`start` and :meth:`begin`, then for every batch the gradient at the local
    model and :meth:`step`, :meth:`end_epoch` after each epoch, and :meth:`finish`.
    """

    _example = "SGD(lr=0.1)"
    _known_needs = get_args(Need)
    wrapper_kind: ClassVar[WrapperKind] = "change"  # effect of a wrapper on the rule inside
    incompatible: ClassVar[Mapping[WrapperKind, str]] = MappingProxyType({})
    """Kinds of wrappers that must not be put around it, each with the reason."""

    corrects: ClassVar[bool] = False  # its memory has corrections: zero for personal parameters

    @property
    def needs(self) -> frozenset[Need]:
        """Return the optional values of the context and of batches that the rule uses."""
        return frozenset()

    @property
    def full_pass(self) -> FullPassTiming:
        """Return the full passes over its own data that the client needs."""
        return "never"

    @property
    def uses_epoch_end(self) -> bool:
        """Tell the engine to call :meth:`end_epoch`."""
        return False

    @property
    def extra_epochs(self) -> int:
        """Return the local epochs that the rule needs besides those of the protocol."""
        return 0

    @property
    def gradients_per_step(self) -> int:
        """Return the gradients of a batch that a step needs; more than 1 call next_point."""
        return 1

    @property
    def own_loss(self) -> bool:
        """Tell the engine to train on :meth:`loss` instead of the task's loss."""
        return False

    @property
    def is_personal(self) -> bool:
        """Tell whether clients use :meth:`personal_model` instead of the global model."""
        return False

    def init_memory(self, params: Tree) -> State:
        """Return the memory of a client that was never sampled before."""
        return ()

    def start(self, context: ClientContext) -> Tree:
        """Return the model at which local training starts."""
        return context.params

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        """Return the state of one local training; ``full_pass`` is ``()`` unless asked for."""
        return ()

    def references(self, context: ClientContext) -> tuple[Tree, ...]:
        """Return the models whose outputs :meth:`loss` compares with, such as the global one."""
        return ()

    def loss(self, context: ClientContext, batch: BatchOutputs) -> Tensor:
        """Return one loss per example of a batch."""
        return batch.losses

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        """Return the point of a batch's next gradient, and the state; before :meth:`step`."""
        return params, scratch

    @abstractmethod
    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        """Take one local step: the equations of the algorithm."""

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        """Update the state after a local epoch; the second value is false to stop training."""
        return scratch, True

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        """Return the upload, and the memory until the client is sampled again."""
        return Upload(context.params - params), context.memory

    def wire(self, upload: Upload) -> State | int:
        """Return the values of an upload that travel (not those that follow), or their bytes."""
        return upload

    def personal_model(self, params: Tree, memory: State) -> Tree:
        """Return the model that a client uses, from the global one and its memory."""
        return params


class ServerRule(Rule, ABC):
    """Base of server rules. Only :meth:`update` is abstract."""

    _example = "Average()"
    only_weights: ClassVar[Weights | None] = None  # weighting that its equations need, if any

    @property
    def needs(self) -> frozenset[Need]:
        """Return the optional values of the cohort that the rule uses: ``client``, ``key``."""
        return frozenset()

    @property
    def own_weights(self) -> bool:
        """Tell the engine to weight uploads by :meth:`weigh`."""
        return False

    def init(self, params: Tree) -> State:
        """Return the server state before the first round."""
        return ()

    def send(self, params: Tree, state: State) -> Tree:
        """Return the model that is sent to the clients."""
        return params

    def share(self, state: State) -> State:
        """Return what is sent to the clients besides the model."""
        return ()

    def wire(self, params: Tree, clients: int) -> State:
        """Return the values of a model that travel to each of so many clients, for their size."""
        return params

    def weigh(self, state: State, clients: Tensor, weights: Tensor) -> Tensor:
        """Return weights of clients, by number, in place of those of examples (or equal ones)."""
        return weights

    @abstractmethod
    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        """Return the next global model and server state."""


class Aggregator(Rule, ABC):
    """Base of stages that merge the model updates of a cohort in another way than their mean.

    It sees all updates of a round at once, so all of them are kept in memory. It works with
    algorithms whose uploads are a ``delta`` alone.
    """

    streams: ClassVar[bool] = False  # take the weighted mean instead, which keeps no update

    _example = "Median()"

    @property
    def fewest(self) -> int:
        """Return the number of updates below which a round changes nothing."""
        return 1

    def check_cohort(self, cohort: int) -> None:
        """Refuse a cohort that is too small."""
        if not self.streams and cohort < self.fewest:
            needed = f"{type(self).__name__} needs at least {self.fewest} clients"
            raise InputError(f"cohort = {cohort}: {needed}")

    def init(self, params: Tree) -> State:
        """Return the state before the first round."""
        return ()

    @abstractmethod
    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        """Merge updates into one, and return the next state."""


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A client rule, a server rule, and the weights of clients when uploads are averaged."""

    name: str
    client: ClientRule
    server: ServerRule
    weights: Weights = "examples"
    aggregator: Aggregator | None = None  # own way to merge updates; else the federation's, or mean
    parts: Parts = Parts()

    def __post_init__(self) -> None:
        check_names("weights", [self.weights], get_args(Weights))
        try:
            check_rule("client", self.client, ClientRule)
            check_rule("server", self.server, ServerRule)
            if self.aggregator is not None:
                check_rule("aggregator", self.aggregator, Aggregator)
            _check_pairing(self.client, self.server)
            _check_wrappers(self.client)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        for rule in chain(self.server):
            needed = getattr(rule, "only_weights", None)
            if needed is not None and self.weights != needed:
                raise InputError(f"{self.name}: weights = {self.weights!r}: it needs {needed!r}")

    def for_layout(self, layout: Layout, population: int | None = None) -> "Algorithm":
        """Return a copy whose rules know a model's layout, and ``population`` if they have it."""
        client, server = self.client.for_layout(layout), self.server.for_layout(layout)
        if any(hasattr(rule, "population") for rule in chain(server)):
            server = replace_in_chain(server, "population", population)
        return dataclasses.replace(self, client=client, server=server)

    def options(self) -> dict[str, Any]:
        """Return every option by key, such as ``{"client.lr": 0.1, "weights": "examples"}``."""
        own: dict[str, Any] = {"weights": self.weights, **self.parts.options()}
        return own | {key: getattr(rule, f.name) for key, (rule, f) in self.fields().items()}

    def fields(self) -> dict[str, tuple[Rule, dataclasses.Field[Any]]]:
        """Return the rule and the field of every option but the weights, outermost rules first."""
        found: dict[str, tuple[Rule, dataclasses.Field[Any]]] = {}
        for side in ("client", "server"):
            for rule in chain(getattr(self, side)):
                for field in dataclasses.fields(rule):
                    inner = isinstance(getattr(rule, field.name), Rule)
                    if not inner and not field.metadata.get("derived"):
                        found.setdefault(f"{side}.{field.name}", (rule, field))
        return found

    def with_options(self, options: Mapping[str, Any]) -> "Algorithm":
        """Return a copy with ``client.F``, ``server.F``, ``parts.F`` or ``weights`` changed."""
        changed = self
        check_names(f"option of {self.name}", options, self.options())
        for name, value in options.items():
            side, _, field = name.rpartition(".")
            try:
                if not side:
                    changed = dataclasses.replace(changed, weights=value)
                else:
                    own = replace_in_chain(getattr(changed, side), field, value)
                    changed = dataclasses.replace(changed, **{side: own})
            except InputError as error:
                raise InputError(f"{self.name}, {name}: {error}") from None
        return changed


@dataclasses.dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm with its defaults, and what a user wants to know about it.

    Traffic and state are declared here in multiples of the model and checked against what is
    counted in a run. Scalars (steps, rounds, losses, learning rates) are left out.
    """

    algorithm: Algorithm
    summary: str
    source: str  # authors and year
    family: str = "others"  # row of the README's table that names it
    down: float = 1  # sent to each client of a cohort, every round
    up: float = 1  # sent back
    client_keeps: float = 0  # kept between rounds by every client that has taken part
    server_keeps: float = 0  # kept by the server besides the model
    inferred: str = ""  # parts that we inferred without a source; shown wherever results are
    about: str = ""  # equations and remarks: the docstring of its module, which the table fills in


def _check_pairing(client: ClientRule, server: ServerRule) -> None:
    sides = [{r.pairing: type(r).__name__ for r in chain(side)} for side in (client, server)]
    alone = (sides[0].keys() ^ sides[1].keys()) - {""}
    if alone:
        # The rule whose partner is missing, or the innermost one.
        names = [next((own[p] for p in alone & own.keys()), [*own.values()][-1]) for own in sides]
        both = f"{names[0]} clients do not work with the server rule {names[1]}"
        raise InputError(f"{both}: use both sides of {' and '.join(sorted(alone))}, or neither")


_ORDER: Mapping[WrapperKind, int] = {"clip": 0, "change": 1, "project": 1, "pull": 2}
"""Order of wrappers from the loss to the step; others may be anywhere."""


def _check_wrappers(client: ClientRule) -> None:
    for outer, inner in itertools.combinations(chain(client), 2):
        around = f"{type(outer).__name__} around {type(inner).__name__}"
        if outer.wrapper_kind in inner.incompatible:
            raise InputError(f"{around}: {inner.incompatible[outer.wrapper_kind]}")
        order = [_ORDER[r.wrapper_kind] for r in (outer, inner) if r.wrapper_kind in _ORDER]
        if inner_rules(inner) and order != sorted(order):
            wanted = "gradients are clipped, then projected, then the model is pulled"
            raise InputError(f"{around}: {wanted}, outermost first; swap the two")
