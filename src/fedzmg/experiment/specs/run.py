"""Specification of a run, and the parts that grids and studies share with it."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import pydantic
import torch

from fedzmg import algorithms, tasks
from fedzmg.algorithms.options import configure, known_options
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.specs.strict import Setting, Strict, Value
from fedzmg.models.kernels.precision import Precision
from fedzmg.simulation import Device, EngineName, Trial
from fedzmg.storage.formats import flat
from fedzmg.tasks.preset import tuned
from fedzmg.tasks.task import Protocol, Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Experiment(Strict):
    """Shared parts of runs, grids and studies."""

    tables: ClassVar[tuple[str, ...]]
    """Tables of settings."""

    task: str
    engine: EngineName = "auto"
    device: Device = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "float32"
    """Precision of layers on a GPU; weights and updates keep ``dtype``."""
    deterministic: bool = False
    """On a GPU: the same bits whenever the same runs are packed together, also after a resume."""
    preset: dict[str, Value] = {}
    """Fields of the task's preset: centring, ...; ``fedzmg list TASK`` shows them."""
    protocol: dict[str, Value] = {}
    """Fields of the task's protocol: cohort, batch_size, epochs, ..."""

    def bases(self) -> list[str]:
        """Return the names of the algorithms that train."""
        raise NotImplementedError

    def build_task(self) -> Task:
        """Build the preset with the user's changes."""
        return tasks.get(self.task, self.preset)

    def with_settings(self, settings: Mapping[str, Setting]) -> Self:
        """Copy with ``key=value`` settings; keys as in the TOML file, ``client.lr`` in tables."""
        values = self.model_dump(exclude_none=True)
        # New algorithms come first: the other settings are for them.
        for key, value in sorted(settings.items(), key=lambda item: item[0] != "algorithms"):
            if not (paths := self._paths(values, key)):
                # A task that was made in Python is not listed.
                listed = [f"fedzmg list {self.task}"] * (self.task in tasks.TASKS)
                commands = [self.listing, *listed, "fedzmg list ALGORITHM"]
                raise unknown("key", key, self._known_keys(), *commands)
            for *names, last in paths:
                table = values
                for name in names:
                    table = table.setdefault(name, {})
                    if not isinstance(table, dict):
                        raise InputError(f"{name} = {table!r}: expected a table, to set {key} in")
                table[last] = value
        return type(self).parse(values)

    def _paths(self, values: dict[str, Any], key: str) -> list[tuple[str, ...]]:
        """Return the places that a key sets, each as names of tables; none if it is unknown."""
        table, _, name = key.partition(".")
        is_known = table in (self.tables if name else type(self).model_fields)
        return [(table, name) if name else (key,)] if is_known else []

    def _known_keys(self) -> list[str]:
        entry = tasks.TASKS.get(self.task)
        keys = [key for key in type(self).model_fields if key not in self.tables]
        keys += [] if entry is None else [f"preset.{name}" for name in entry.options()]
        keys += [f"protocol.{name}" for name in Protocol.__dataclass_fields__]
        keys += [f"stop.{name}" for name in self.keys_of(["stop"])] if "stop" in self.tables else []
        bases = [algorithms.get(name) for name in self.bases() if name in algorithms.ALGORITHMS]
        return keys + [key for base in bases for key in known_options(base)]


def by_side(options: Mapping[str, Any]) -> dict[str, dict[str, Value]]:
    """Return the tables of options such as ``client.lr``.

    >>> by_side({"weights": "uniform", "client.lr": 0.1})
    {'client': {'lr': 0.1}, 'server': {}}
    """
    found: dict[str, dict[str, Value]] = {"client": {}, "server": {}}
    for key, value in options.items():
        side, _, name = key.partition(".")
        if name and value is not None:
            found[side][name] = value
    return found


class RunSpec(Experiment):
    """One run: a task, an algorithm with its hyper-parameters, a seed and its execution."""

    listing: ClassVar[str] = "fedzmg schema run"
    tables: ClassVar[tuple[str, ...]] = ("preset", "protocol", "client", "server")

    algorithm: str = "fedzmg"
    seed: int = pydantic.Field(default=0, ge=0)
    client_metrics_every: int = pydantic.Field(default=0, ge=0)
    """Interval of evaluations on each client's own examples: after rounds 1, 1 + N, ... and the
    last; 0: only after the last. It does not affect training."""
    weights: Literal["examples", "uniform"] | None = None
    client: dict[str, Value] = {}
    """Fields of the client rule: lr, momentum, decay, ...; clip_norm, clip_value, schedule, ..."""
    server: dict[str, Value] = {}
    """Fields of the server rule: lr, ...; schedule, ..."""

    def bases(self) -> list[str]:
        return [self.algorithm]

    def for_algorithm(self, name: str) -> tuple[RunSpec, list[str]]:
        """Copy for another algorithm; return it with the keys that are left out.

        Learning rates and other options belong to the algorithm they were chosen for.
        """
        algorithms.get(name)
        if name == self.algorithm:
            return self, []
        left_out = list(flat({"client": self.client, "server": self.server}))
        left_out += ["weights"] * (self.weights is not None)
        blank: dict[str, Any] = {"client": {}, "server": {}, "weights": None}
        return self.model_copy(update={**blank, "algorithm": name}), left_out

    def build_algorithm(self, task: Task | None = None) -> Algorithm:
        """Build the algorithm with the task's recommended hyper-parameters, then the user's."""
        known = tuned(self.task) if task is None else task.options
        own = flat({"client": self.client, "server": self.server})
        options: dict[str, Any] = {**known.get(self.algorithm, {}), **own}
        if self.weights is not None:
            options["weights"] = self.weights
        return configure(algorithms.get(self.algorithm), options)

    def build_protocol(self, task: Task) -> Protocol:
        """Build the task's protocol with the user's changes."""
        return task.protocol.with_options(self.protocol)

    def resolve(self, task: Task, name: str = "") -> ResolvedRun:
        """Write every default out and build the trial; packs of several algorithms need a name."""
        algorithm = self.build_algorithm(task)
        changes = {
            **by_side(algorithm.options()),
            "weights": algorithm.weights,
            "preset": dict(task.preset),
            "protocol": dict(vars(self.build_protocol(task))),
        }
        return ResolvedRun(self.model_copy(update=changes), Trial(algorithm, self.seed, name))


class ResolvedRun(NamedTuple):
    """A run with every default written out, and its trial."""

    spec: RunSpec
    trial: Trial

    def resolve(self, _: Task) -> ResolvedRun:
        """Return the run itself."""
        return self
