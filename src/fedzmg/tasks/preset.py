"""Presets: frozen dataclasses whose described fields are options that a user can change.

A field declared with :func:`decision` is an option (``--set preset.centring=image``). A field
without a description identifies the preset.
"""

import contextlib
import dataclasses
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib import resources
from typing import Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

from torch import nn

from fedzmg.data.federated import Examples, FederatedData
from fedzmg.errors import InputError, brief, check_names
from fedzmg.models.batch_norm import BatchNormPolicy
from fedzmg.models.functional import FunctionalModel
from fedzmg.plugins import user_code
from fedzmg.tasks.protocol import Protocol
from fedzmg.tasks.task import Task
from fedzmg.tree import num_bytes

TUNED_ON = {"digits-personal": "digits"}  # tasks that use the learning rates tuned on another one


class Tuning(NamedTuple):
    """Best point of a search for one algorithm on one task."""

    options: Mapping[str, float]
    source: str  # file or directory of the search, with every score
    remark: str = ""  # reason to distrust the point; empty if there is none


@cache
def tunings(task: str) -> Mapping[str, Tuning]:
    """Return kept searches by algorithm name; ``tools/tune.py --adopt`` writes them."""
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    found = json.loads(text).get(TUNED_ON.get(task, task), {})
    return {name: Tuning(**fields) for name, fields in found.items()}


@cache
def tuned(task: str) -> Mapping[str, Mapping[str, float]]:
    """Return tuned options by algorithm name; empty for a task that was never tuned."""
    return {name: found.options for name, found in tunings(task).items()}


def decision(default: str | float, doc: str, *, low: int = 0, high: int = 2**63 - 1) -> Any:
    """Declare an option: a word of its ``Literal`` type, or a number from ``low`` to ``high``."""
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "high": high})


class Decision(NamedTuple):
    """One option of a preset and its current value."""

    name: str
    value: Any
    default: Any
    words: tuple[str, ...]  # allowed words; empty for a number
    low: int
    high: int
    doc: str

    @property
    def rule(self) -> tuple[str, bool]:
        """Allowed values in words, and True if the value is one of them."""
        value, low, high = self.value, self.low, self.high
        if self.words:
            return f"{', '.join(self.words[:-1])} or {self.words[-1]}", value in self.words
        kind = int | float if isinstance(self.default, float) else int
        number = isinstance(value, kind) and not isinstance(value, bool)
        if isinstance(self.default, float):
            return f"a number above {low}", number and low < value <= high
        bound = "of at least {}" if high > 2**32 else "from {} to {}"
        return f"a whole number {bound.format(low, high)}", number and low <= value <= high


@dataclasses.dataclass(frozen=True)
class Preset(ABC):
    """Everything that is decided before a task is built."""

    name: str
    clients: int  # number of training clients in the whole data set
    data: str = ""  # name of the data set in the catalog; empty if it ships with the package
    summary: str = ""
    protocol: ClassVar[Protocol]

    def __post_init__(self) -> None:
        for option in self.decisions():
            expected, valid = option.rule
            if not valid:
                value = brief(option.value)
                raise InputError(f"preset.{option.name} = {value}: expected {expected}")

    @abstractmethod
    def network(self) -> nn.Module:
        """Build the model, with any weights."""

    @abstractmethod
    def build(self) -> Task:
        """Build the task."""

    def assembled(self, train: FederatedData, tune: Examples, test: Examples, **parts: Any) -> Task:
        """Build the task around its data and other parts, with network, protocol and tuned options.

        With fewer clients than the cohort, all of them take part in every round; a note says so.
        """
        protocol, notes = self.protocol, tuple(parts.pop("notes", ()))
        if protocol.cohort > len(train):
            few = f"{len(train)} clients are here: a round draws all of them instead of "
            notes += (f"{few}{protocol.cohort}",)
            protocol = dataclasses.replace(protocol, cohort=len(train))
        parts = {"options": tuned(self.name), "preset": self.options(), "tune": tune, **parts}
        model = FunctionalModel(self.network())
        return Task(self.name, model, train, test, protocol=protocol, notes=notes, **parts)

    def decisions(self) -> list[Decision]:
        """List the options in order of declaration."""
        hints = get_type_hints(type(self))
        found = []
        for field in dataclasses.fields(self):
            if field.metadata:
                value, words = getattr(self, field.name), get_args(hints[field.name])
                found.append(Decision(field.name, value, field.default, words, **field.metadata))
        return found

    def options(self) -> dict[str, Any]:
        """Return every option's value by name."""
        return {option.name: option.value for option in self.decisions()}

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Copy with some options changed."""
        self._check_names(options)
        return dataclasses.replace(self, **options)

    def _check_names(self, options: Mapping[str, Any]) -> None:
        if not isinstance(options, Mapping):
            raise InputError(f"preset = {options!r}: expected fields by name, {{'alpha': 0.1}}")
        known = self.options()
        if options and not known:
            raise InputError(f"preset = {dict(options)}: the task {self.name!r} has no options")
        check_names(f"preset field of {self.name}", options, known, f"fedzmg list {self.name}")

    @property
    def missing(self) -> str:
        """Command that fetches the data; empty if nothing is missing."""
        from fedzmg.data import catalog, sources

        with contextlib.suppress(InputError):  # damaged
            if not self.data or catalog.stored(self.data) is not None:
                return ""
        return sources.remedy(self.data)

    def describe(self) -> dict[str, Any]:
        """Return data, clients, model, protocol, tuned options and fields, ready for JSON."""
        params = FunctionalModel(self.network()).params()
        parameters = sum(leaf.numel() for leaf in params.values())
        fields = [
            {"key": f"preset.{o.name}", "default": o.value, "range": o.rule[0], "doc": o.doc}
            for o in self.decisions()
        ]
        return {
            "name": self.name, "summary": self.summary,
            "about": inspect.cleandoc(type(self).__doc__ or ""), "data": self.data or None,
            "missing": self.missing, "clients": self.clients, "fields": fields,
            "model": {"parameters": parameters, "bytes": num_bytes(params)},
            "protocol": dict(vars(self.protocol)),
            "tuned": {name: found._asdict() for name, found in tunings(self.name).items()},
        }  # fmt: skip


class OwnTask(Preset):
    """A task that a user brings: a :class:`Task`, or a function without arguments that makes it."""

    source: Task | Callable[[], Task]

    def __init__(self, name: str, source: Task | Callable[[], Task]) -> None:
        summary = "" if isinstance(source, Task) else inspect.getdoc(source) or ""
        vars(self).update(name=name, data="", summary=summary.partition("\n")[0], source=source)

    @cached_property
    def task(self) -> Task:
        """The task, made when it is first used."""
        made: Any = self.source
        if not isinstance(made, Task):
            with user_code(f"task {self.name!r}"):
                made = made()
        if not isinstance(made, Task):
            raise InputError(f"task {self.name!r} is a {type(made).__name__}: return a fedzmg.Task")
        # Results carry the name by which a user finds it again.
        return dataclasses.replace(made, name=self.name)

    @property
    def clients(self) -> int:
        return len(self.task.train)

    @property
    def protocol(self) -> Protocol:  # type: ignore[override]
        return self.task.protocol

    def network(self) -> nn.Module:
        return self.task.model.module

    def with_options(self, options: Mapping[str, Any]) -> Self:
        if not options:
            return self
        self._check_names(options)
        task, parts = self.task, self.task.parts
        model = FunctionalModel(task.model.source, task.model.axes, options["batch_norm"])
        if task.model.batch_norm == "local":
            own = tuple(pattern for pattern in parts.personal if pattern != "batch_norm")
            parts = dataclasses.replace(parts, personal=own)
        return type(self)(self.name, dataclasses.replace(task, model=model, parts=parts))

    def decisions(self) -> list[Decision]:
        words, doc = get_args(BatchNormPolicy), "statistics of BatchNorm layers (docs/models.md)"
        own = self.task.preset.items()
        return [Decision(name, value, words[0], words, 0, 0, doc) for name, value in own]

    def build(self) -> Task:
        return self.task

    def describe(self) -> dict[str, Any]:
        own = self.task.options.items()
        tuned_options = {name: Tuning(best, "the task")._asdict() for name, best in own}
        about = {"about": (callable(self.source) and inspect.getdoc(self.source)) or ""}
        return super().describe() | about | {"tuned": tuned_options}
