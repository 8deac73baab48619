"""Specification of a run."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import pydantic
import torch

from fedzmg import algorithms, tasks
from fedzmg.algorithms.options import configure, known_options
from fedzmg.contract import Algorithm
from fedzmg.errors import unknown
from fedzmg.experiment.specs.strict import Strict, Value, parse_setting
from fedzmg.models.kernels.precision import Precision
from fedzmg.simulation import Device, EngineName, Trial
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tasks.tuned import tuned

__all__ = ["DTYPES", "TABLES", "ResolvedRun", "RunSpec", "Value", "parse_setting"]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
TABLES = ("preset", "protocol", "client", "server")


class RunSpec(Strict):
    """One run: a task, an algorithm with its hyper-parameters, a seed and its execution."""

    listing: ClassVar[str] = "fedzmg schema run"

    task: str
    algorithm: str = "fedzmg"
    seed: int = 0
    engine: EngineName = "auto"
    device: Device = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "float32"
    """Precision of layers on a GPU; weights and updates keep ``dtype``."""
    client_metrics_every: int = pydantic.Field(default=0, ge=0)
    """Interval of evaluations on each client's own examples: after rounds 1, 1 + N, ... and the
    last; 0: only after the last. It does not affect training."""
    deterministic: bool = False
    """On a GPU: the same bits whenever the same runs are packed together, also after a resume."""
    weights: Literal["examples", "uniform"] | None = None
    preset: dict[str, Value] = {}
    """Fields of the task's preset: centring, selection, ...; ``fedzmg list TASK`` shows them."""
    protocol: dict[str, Value] = {}
    """Fields of the task's protocol: rounds, cohort, batch_size, epochs, ..."""
    client: dict[str, Value] = {}
    """Fields of the client rule: lr, momentum, decay, ...; clip_norm, clip_value, schedule, ..."""
    server: dict[str, Value] = {}
    """Fields of the server rule: lr, ...; schedule, ..."""

    def with_settings(self, settings: Mapping[str, Value]) -> RunSpec:
        """Copy with ``key=value`` settings; keys as in the TOML file, ``client.lr`` in tables."""
        values = self.model_dump()
        for key, value in settings.items():
            table, _, name = key.rpartition(".")
            if table in TABLES:
                values[table][name] = value
            elif table or name not in RunSpec.model_fields:
                # A task that was made in Python is not listed.
                names = [self.task] * (self.task in tasks.TASKS) + [self.algorithm]
                commands = [self.listing, *(f"fedzmg list {name}" for name in names)]
                raise unknown("key", key, self._known_keys(), *commands)
            else:
                values[name] = value
        return RunSpec.parse(values)

    def _known_keys(self) -> list[str]:
        own = [k for k in RunSpec.model_fields if k not in TABLES]
        own += known_task_keys(self.task) + known_options(algorithms.get(self.algorithm))
        return list(dict.fromkeys(own))

    def for_algorithm(self, name: str) -> tuple[RunSpec, list[str]]:
        """Copy for another algorithm; return it with the keys that are left out.

        Learning rates and other options belong to the algorithm they were chosen for.
        """
        algorithms.get(name)
        if name == self.algorithm:
            return self, []
        left_out = [f"{side}.{key}" for side in ("client", "server") for key in getattr(self, side)]
        if self.weights is not None:
            left_out.append("weights")
        blank: dict[str, Any] = {"client": {}, "server": {}, "weights": None}
        return self.model_copy(update={**blank, "algorithm": name}), left_out

    def build_task(self) -> Task:
        """Build the preset with the user's changes."""
        return tasks.get(self.task, self.preset)

    def build_algorithm(self, task: Task | None = None) -> Algorithm:
        """Build the algorithm with the task's recommended hyper-parameters, then the user's."""
        known = tuned(self.task) if task is None else task.options
        options: dict[str, Any] = dict(known.get(self.algorithm, {}))
        options |= {f"client.{k}": v for k, v in self.client.items()}
        options |= {f"server.{k}": v for k, v in self.server.items()}
        if self.weights is not None:
            options["weights"] = self.weights
        return configure(algorithms.get(self.algorithm), options)

    def build_protocol(self, task: Task) -> Protocol:
        """Build the task's protocol with the user's changes."""
        return task.protocol.with_options(self.protocol)

    def resolve(self, task: Task) -> ResolvedRun:
        """Write every default out and build the trial."""
        algorithm = self.build_algorithm(task)
        sides: dict[str, dict[str, Value]] = {"client": {}, "server": {}}
        for key, value in algorithm.options().items():
            side, _, name = key.rpartition(".")
            if side and value is not None:
                sides[side][name] = value
        changes = {
            **sides,
            "weights": algorithm.weights,
            "preset": dict(task.preset),
            "protocol": dict(vars(self.build_protocol(task))),
        }
        return ResolvedRun(self.model_copy(update=changes), Trial(algorithm, self.seed))


class ResolvedRun(NamedTuple):
    """A run with every default written out, and its trial."""

    spec: RunSpec
    trial: Trial

    def resolve(self, _: Task) -> ResolvedRun:
        """Return the run itself."""
        return self

    def named(self, name: str) -> ResolvedRun:
        """Name the trial, for packs of several algorithms."""
        return self._replace(trial=replace(self.trial, name=name))


def known_task_keys(task: str) -> list[str]:
    """Return the keys of a task's preset and protocol."""
    entry = tasks.TASKS.get(task)
    preset = [] if entry is None else [f"preset.{name}" for name in entry.preset.options()]
    return preset + [f"protocol.{name}" for name in Protocol.__dataclass_fields__]
