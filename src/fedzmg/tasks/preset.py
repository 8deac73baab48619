"""Presets: frozen dataclasses whose described fields are decisions that a user can change.

A field declared with :func:`decision` is an option (``--set preset.centring=image``); one without
a description says which preset it is.
"""

from __future__ import annotations

import dataclasses
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from fedzmg.data.federated import Examples, FederatedData
from fedzmg.errors import InputError, unknown
from fedzmg.evaluation import ACCURACY, Metric
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import Initializer
from fedzmg.models.objective import LossFunction, PrepareFunction
from fedzmg.tasks.losses import cross_entropy
from fedzmg.tasks.source import missing
from fedzmg.tasks.task import Protocol, Task, as_stored
from fedzmg.tasks.tuned import tuned

Value: TypeAlias = bool | int | float | str


def decision(default: str | float, doc: str, *, low: int = 0) -> Any:
    """Declare an option.

    A word of its ``Literal`` type, a whole number of at least ``low``, or a number above ``low``.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low})


class Decision(NamedTuple):
    """One option of a preset, as it is set now."""

    name: str
    value: Value
    words: tuple[str, ...]
    """The words allowed; empty for a number."""
    low: int
    doc: str
    default: Any = ""

    @property
    def range(self) -> str:
        """What may be given.

        >>> Decision("centring", "none", ("none", "image"), 0, "").range
        'none or image'
        """
        if not self.words and isinstance(self.default, float):
            return f"a number above {self.low}"
        if not self.words:
            return f"a whole number of at least {self.low}"
        *others, last = self.words
        return f"{', '.join(others)} or {last}" if others else last

    def accepts(self, value: Any) -> bool:
        """Whether this value may be given."""
        if self.words:
            return value in self.words
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(self.default, float):
            return self.low < value < float("inf")
        return isinstance(value, int) and value >= self.low


@dataclass(frozen=True)
class Preset(ABC):
    """Everything that is decided before a task is built."""

    name: str
    """Of the task; run directories and tables show it."""

    def __post_init__(self) -> None:
        """Refuse a value that no decision can have."""
        for option in self.decisions():
            if not option.accepts(option.value):
                raise InputError(
                    f"preset.{option.name} = {option.value!r}: expected {option.range}"
                )

    @property
    def data(self) -> str | None:
        """Name of the data set in the catalog; None for what ships with the package."""
        return None

    @property
    @abstractmethod
    def clients(self) -> int:
        """How many training clients the whole data set has."""

    @property
    @abstractmethod
    def protocol(self) -> Protocol:
        """How a federation trains on this task."""

    @abstractmethod
    def network(self) -> nn.Module:
        """The model, with any weights."""

    @abstractmethod
    def build(self) -> Task:
        """The task.

        Raises:
            InputError: if its data is not here or does not fit.
        """

    def assembled(
        self,
        train: FederatedData,
        tune: Examples,
        test: Examples,
        *,
        init: Initializer,
        prepare: PrepareFunction = as_stored,
        loss: LossFunction = cross_entropy,
        metric: Metric = ACCURACY,
        test_owners: npt.NDArray[np.int64] | None = None,
        notes: Sequence[str] = (),
    ) -> Task:
        """The task of this name around data: with its network, protocol and tuned options.

        Where fewer clients are here than a round draws, a round draws all of them and a note says
        so; a user can still choose a smaller cohort.
        """
        protocol = self.protocol
        if protocol.cohort > len(train) and not protocol.replacement:
            few = f"{len(train)} clients are here: a round draws all of them instead of "
            notes = (*notes, f"{few}{protocol.cohort}")
            protocol = dataclasses.replace(protocol, cohort=len(train))
        return Task(
            name=self.name,
            model=FunctionalModel(self.network()),
            train=train,
            tune=tune,
            test=test,
            test_owners=test_owners,
            loss=loss,
            metric=metric,
            prepare=prepare,
            init=init,
            protocol=protocol,
            options=tuned(self.name),
            preset=self.options(),
            notes=tuple(notes),
        )

    def decisions(self) -> list[Decision]:
        """The options, in the order of declaration."""
        hints = typing.get_type_hints(type(self))
        return [
            Decision(
                field.name,
                getattr(self, field.name),
                typing.get_args(hints[field.name]),
                field.metadata["low"],
                field.metadata["doc"],
                field.default,
            )
            for field in dataclasses.fields(self)
            if "doc" in field.metadata
        ]

    def options(self) -> dict[str, Value]:
        """Every option and its value."""
        return {option.name: option.value for option in self.decisions()}

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """A copy with some decisions taken otherwise.

        Raises:
            InputError: for an unknown option (the nearest is suggested) or a wrong value.
        """
        if not isinstance(options, Mapping):
            raise InputError(f"preset = {options!r}: expected fields by name, {{'alpha': 0.1}}")
        known = self.options()
        for name in options:
            if not known:
                raise InputError(f"preset.{name}: the task {self.name!r} has nothing to choose")
            if name not in known:
                raise unknown(
                    f"preset field of {self.name}", name, known, f"fedzmg list {self.name}"
                )
        return dataclasses.replace(self, **options)


@dataclass(frozen=True)
class TaskInfo:
    """One row of the table of presets."""

    preset: Preset
    summary: str

    @property
    def data(self) -> str | None:
        """Name of its data set in the catalog; None for what ships with the package."""
        return self.preset.data

    @property
    def missing(self) -> str:
        """The command that brings its data here; empty if nothing is missing."""
        return "" if self.data is None else missing(self.data)
