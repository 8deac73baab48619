"""Choose hyper-parameters by a grid: all pairs and seeds of an algorithm train side by side.

::

    grid.toml                   what was asked for
    grid.json                   scores, best points, neighbours; rewritten after every algorithm
    ALGORITHM/manifest.json     versions, device, data hash, execution path
    ALGORITHM/metrics.jsonl     a line per trial and evaluated round, append-only; later lines win
    ALGORITHM/scores.json       once it is finished; it is not trained again
    ALGORITHM/checkpoint.safetensors, ALGORITHM/memory    only until then
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedzmg.data.federated import Examples
from fedzmg.engine.choose import EngineChoice
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment import lock, manifest
from fedzmg.experiment.budget import Budget, TimeIsUp
from fedzmg.experiment.lock import Hold, hold
from fedzmg.experiment.plans import GridSpec, Plan
from fedzmg.experiment.run import HeldInterrupt, Progress, Silent
from fedzmg.experiment.spec import DTYPES
from fedzmg.experiment.store import write_json
from fedzmg.experiment.strict import read_toml
from fedzmg.files import sync_directory, write_atomic
from fedzmg.simulation import Checkpoint, Record, Simulation, Trial, resolve_device
from fedzmg.tasks.task import Task

FORMAT = 1
CHECKPOINT_SECONDS = 60.0
CHECKPOINT_SHARE = 0.05
"""Of the time, what writing checkpoints may take: a pack of large models is gigabytes."""


class GridTrial(NamedTuple):
    """One training of a grid."""

    options: dict[str, float]
    seed: int


def run_grid(
    spec: GridSpec,
    out: Path,
    *,
    task: Task | None = None,
    progress: Progress | None = None,
    max_minutes: float | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> dict[str, Any]:
    """Train every point of the grid and score it; what is finished is not trained again.

    Args:
        spec: the grid.
        out: its directory; one that holds this grid is continued.
        task: a user's own task; by default the preset that the grid names.
        progress: what shows how far the work is.
        max_minutes: end cleanly after the first round past this time.
        checkpoint_seconds: how often to write checkpoints, or less often where they are large;
            0: after every round.

    Returns:
        What ``grid.json`` holds.

    Raises:
        InputError: for a mistake in the grid, or a directory that holds something else.
        TimeIsUp: when ``max_minutes`` are over, with everything finished kept.
        Interrupted: on Ctrl-C, likewise.
    """
    progress, budget = progress or Silent(), Budget(max_minutes)
    spec.check(task)
    task = choosing(task or spec.build_task(), spec)
    with hold([out], progress.say) as held:
        claim(out, spec, "grid.toml")
        found: dict[str, Any] = {}
        for name in spec.algorithms:
            place = out / spec.folder(name)
            if not (place / "scores.json").is_file():
                _Search(spec, name, task, place, progress, budget, checkpoint_seconds, held).run()
            else:
                progress.begin(name, spec.rounds, spec.rounds)
            found[name] = read_json(place / "scores.json")
            write_json(out / "grid.json", _summary(spec, task, found))
    return read_json(out / "grid.json")


def choosing(task: Task, spec: GridSpec) -> Task:
    """The task as a grid sees it: its protocol, and as test data what may choose.

    Raises:
        InputError: if no examples are set aside for choosing.
    """
    test = task.test
    if spec.selection == "tune":
        if task.tune is None:
            raise InputError(
                f"task {task.name!r} sets no examples aside for choosing: give it some as 'tune', "
                'or say selection = "test"'
            )
        test = task.tune
    elif task.tune is not None and task.tune.x is not task.test.x:
        test = Examples(*(torch.cat(pair) for pair in zip(task.tune, task.test, strict=True)))
    # Rounds in between are not evaluated: the search asks for the last ones itself.
    options = {**spec.protocol, "rounds": spec.rounds, "eval_every": spec.rounds}
    return replace(task, test=test, protocol=task.protocol.with_options(options))


def claim(out: Path, spec: Plan, name: str) -> None:
    """Make a directory, which this process holds, that of a plan, or see that it is already.

    Raises:
        InputError: if it holds anything else or cannot be written.
    """
    path = out / name
    if path.is_file():
        kept = type(spec).parse(read_toml(path))
        if kept != spec:
            raise InputError(
                f"{out} holds another {path.stem} ({_difference(kept, spec)}): choose another "
                "place with --out"
            )
        return
    if any(p.name not in (lock.NAME, lock.GUARD) for p in out.iterdir()):
        raise InputError(f"{out} is not empty and holds no {name}: choose another place with --out")
    try:
        write_atomic(path, spec.to_toml().encode())
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror}; choose another place with --out"
        ) from None


def _difference(kept: Plan, asked: Plan) -> str:
    there, here = (_flat(plan.model_dump(exclude_none=True)) for plan in (kept, asked))
    key = next(k for k in [*here, *there] if there.get(k) != here.get(k))
    return f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.") or {prefix + key: {}}
        else:
            found[prefix + key] = value
    return found


def read_json(path: Path, wanted: int | None = FORMAT) -> dict[str, Any]:
    """What a JSON file of ours holds; ``wanted`` is its format, None for any.

    Raises:
        InputError: if it is missing, damaged or of another format.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): remove it to make it again") from None
    found = values.get("format") if isinstance(values, dict) else None
    if not isinstance(values, dict) or (wanted is not None and found != wanted):
        raise InputError(f"{path} has format {found!r}, this version reads {wanted}")
    return values


class _Search:
    """The grid of one algorithm."""

    def __init__(
        self,
        spec: GridSpec,
        name: str,
        task: Task,
        place: Path,
        progress: Progress,
        budget: Budget,
        checkpoint_seconds: float,
        held: Hold,
    ) -> None:
        self.spec, self.name, self.task, self.place = spec, name, task, place
        self.progress, self.budget, self.held = progress, budget, held
        self.checkpoint_seconds = checkpoint_seconds
        self.log = Log(place / "metrics.jsonl")
        self.trials = [GridTrial(p, seed) for p in spec.points(name) for seed in spec.seeds]

    def run(self) -> None:
        """Train pack after pack, then score."""
        size = self.spec.together or len(self.trials)
        for first in range(0, len(self.trials), size):
            members = range(first, min(first + size, len(self.trials)))
            if not self._logged(members, until=self.spec.rounds):
                with self._named_write_errors():
                    self._train(list(members))
        with self._named_write_errors():
            scores = score(self.spec, self.name, self.task, self.log.read())
            write_json(self.place / "scores.json", scores)
            # Only now: a grid that is scored never trains again.
            (self.place / "checkpoint.safetensors").unlink(missing_ok=True)
            shutil.rmtree(self.place / "memory", ignore_errors=True)

    def _logged(self, members: Iterable[int], until: int) -> bool:
        """Whether the log has all rounds that count, up to one of them."""
        done = self.log.read()
        first = self.spec.rounds - self.spec.last + 1
        return all((i, round_) in done for i in members for round_ in range(first, until + 1))

    def _train(self, members: list[int]) -> None:
        kept = self._checkpoint(members)
        if kept is None:
            # Nothing relies on what clients remembered; a crash may have left half of it.
            for i in members:
                shutil.rmtree(self._memory(i), ignore_errors=True)
        simulation = self._simulation(members, kept)
        self.progress.begin(self.name, self.spec.rounds, simulation.round)
        saved, pause = time.monotonic(), self.checkpoint_seconds
        try:
            with HeldInterrupt(self.progress) as interrupt:
                while simulation.round < self.spec.rounds:
                    report = simulation.run_round()
                    self.held.check()
                    records = self._evaluated(simulation, report.records)
                    if records[0].metric is not None:
                        self.log.append(self._lines(members, records))
                    self.progress.advance(report._replace(records=records))
                    finished = simulation.round == self.spec.rounds
                    stop = (interrupt.asked or self.budget.spent) and not finished
                    if stop or (time.monotonic() - saved > pause and not finished):
                        began = time.monotonic()
                        self._save(members, simulation)
                        saved = time.monotonic()
                        if pause > 0:
                            pause = max(pause, (saved - began) / CHECKPOINT_SHARE)
                    if stop and interrupt.asked:
                        raise KeyboardInterrupt
                    if stop:
                        raise TimeIsUp(simulation.round, self.spec.rounds)
        except KeyboardInterrupt:
            raise Interrupted(simulation.round, self.spec.rounds) from None

    def _simulation(self, members: list[int], kept: list[Checkpoint] | None) -> Simulation:
        spec = self.spec
        facts = self._facts()
        fixed = spec.fixed(self.name)
        simulation = Simulation(
            self.task,
            [
                Trial(
                    spec.configured(self.name, {**fixed, **self.trials[i].options}, self.task),
                    self.trials[i].seed,
                )
                for i in members
            ],
            rounds=spec.rounds,
            device=resolve_device(spec.device),
            dtype=DTYPES[spec.dtype],
            # Another execution path would move the last bits.
            engine=(
                EngineChoice(facts["engine"], "as before", facts["onednn"])
                if facts
                else spec.engine
            ),
            precision=spec.precision,
            restored=kept,
            memory_places=[self._memory(i) for i in members],
        )
        if not facts:
            self.place.mkdir(parents=True, exist_ok=True)
            write_json(self.place / "manifest.json", manifest.describe(simulation))
        return simulation

    def _memory(self, trial: int) -> Path:
        return self.place / "memory" / f"trial-{trial}"

    def _facts(self) -> dict[str, Any]:
        """The manifest, if the search began before on the same data."""
        path = self.place / "manifest.json"
        if not path.exists():
            return {}
        facts = read_json(path, None)
        for fact, now in (
            ("data_sha256", self.task.train.fingerprint()),
            ("task_sha256", self.task.fingerprint()),
        ):
            if facts.get(fact) != now:
                raise InputError(
                    f"{self.place} was made with other data or another model than "
                    f"{self.task.name!r} has now: choose another place with --out"
                )
        return facts

    def _evaluated(self, simulation: Simulation, records: list[Record]) -> list[Record]:
        """Records of a round, evaluated if it is one of the last."""
        if simulation.round <= self.spec.rounds - self.spec.last or records[0].metric is not None:
            return records
        worst = 0.0 if self.task.metric.higher_is_better else math.inf
        found = []
        for record, (loss, metric) in zip(records, simulation.evaluate(), strict=True):
            lost = record.diverged or not math.isfinite(loss)
            found.append(
                record._replace(loss=loss, metric=worst if lost else metric, diverged=lost)
            )
        return found

    def _lines(self, members: list[int], records: list[Record]) -> Iterator[dict[str, Any]]:
        for i, record in zip(members, records, strict=True):
            yield {
                "trial": i,
                "round": record.round,
                "seed": self.trials[i].seed,
                **self.trials[i].options,
                "metric": record.metric,
                "loss": record.loss,
                "train_loss": record.train_loss,
                "diverged": record.diverged,
                "seconds": record.seconds,
            }

    def _save(self, members: list[int], simulation: Simulation) -> None:
        """Replace the checkpoint of the whole pack."""
        simulation.memory.flush()
        tensors = {
            f"{member}|{name}": tensor
            for i, member in enumerate(members)
            for name, tensor in simulation.checkpoint(i).tensors.items()
        }
        metadata = {
            "format": str(FORMAT),
            "round": str(simulation.round),
            "members": json.dumps(members),
            "sha256": _digest(tensors),
        }
        path = self.place / "checkpoint.safetensors"
        temporary = path.with_name(f".{path.name}.new")
        try:
            # Straight to the file: a copy of a pack in memory may not fit.
            safetensors.torch.save_file(tensors, temporary, metadata)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        simulation.memory.commit(simulation.round)

    def _checkpoint(self, members: list[int]) -> list[Checkpoint] | None:
        """Where these trials stopped; a damaged file is said, and they start again."""
        path = self.place / "checkpoint.safetensors"
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                if json.loads(facts["members"]) != members:
                    return None  # of a pack that is finished
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if facts["sha256"] != _digest(tensors):
                raise ValueError("its hash is wrong")
            if not self._logged(members, until=int(facts["round"])):
                raise ValueError("metrics.jsonl lacks rounds that it has")
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            self.progress.say(
                f"{path} cannot be used ({error}): {self.name} starts again from round 1"
            )
            return None
        found: dict[int, dict[str, Tensor]] = {member: {} for member in members}
        for name, tensor in tensors.items():
            member, _, own = name.partition("|")
            found[int(member)][own] = tensor
        return [Checkpoint(int(facts["round"]), found[member]) for member in members]

    @contextlib.contextmanager
    def _named_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot write to {self.place}: {error.strerror or error}; what was kept is whole, "
                "run the same command again once there is room"
            ) from None


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Log:
    """Lines of JSON, only ever added; of lines for the same trial and round the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the lines of a round together."""
        text = "".join(f"{json.dumps(_words(row), allow_nan=False)}\n" for row in rows)
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a crash broke a line off
                    text = "\n" + text
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Every line by trial and round.

        Raises:
            InputError: for a line that is damaged and was not merely broken off.
        """
        found: dict[tuple[int, int], dict[str, Any]] = {}
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                for key, value in values.items():
                    if value in ("nan", "inf", "-inf"):
                        values[key] = float(value)
                found[values["trial"], values["round"]] = values
            except (ValueError, TypeError, KeyError, AttributeError):
                if number == len(lines) or not line.endswith(b"}"):
                    continue
                raise InputError(
                    f"{self.path}, line {number} is damaged: restore it, or remove "
                    f"{self.path.parent} to start again"
                ) from None
        return found


def _words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Strict JSON has no word for what is not finite, so it is written as a string."""
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }


def score(
    spec: GridSpec, name: str, task: Task, log: Mapping[tuple[int, int], Mapping[str, Any]]
) -> dict[str, Any]:
    """Scores of an algorithm's grid: one number per point, the best of them and its neighbours."""
    axes, points = spec.axes_of(name), spec.points(name)
    counted = range(spec.rounds - spec.last + 1, spec.rounds + 1)
    higher = task.metric.higher_is_better
    worst = 0.0 if higher else math.inf
    scores, runs, diverged = [], [], []
    for i in range(len(points)):
        each, lost = [], 0
        for j in range(len(spec.seeds)):
            trial = i * len(spec.seeds) + j
            rows = [log[trial, round_] for round_ in counted]
            gone = any(row["diverged"] for row in rows)
            lost += gone
            each.append(worst if gone else statistics.fmean(row["metric"] for row in rows))
        runs.append(each)
        scores.append(statistics.fmean(each))
        diverged.append(lost)
    best = choose_best([len(v) for v in axes.values()], scores, diverged, higher=higher)
    return {
        "format": FORMAT,
        "algorithm": spec.base(name),
        "label": spec.shown(name),
        "fixed": spec.fixed(name),
        "weights": spec.algorithms[name].weights,
        "axes": axes,
        "points": [
            {"options": p, "score": s, "runs": r, "diverged": d}
            for p, s, r, d in zip(points, scores, runs, diverged, strict=True)
        ],
        "best": None if best is None else _described(axes, points, scores, best),
    }


def choose_best(
    shape: Sequence[int], scores: Sequence[float], diverged: Sequence[int], *, higher: bool = True
) -> int | None:
    """The best point of a grid; among equals the one with the better neighbours, then the first.

    None if every point diverged.

    >>> choose_best([3], [0.5, 0.9, 0.9], [0, 0, 0])
    2
    >>> choose_best([2, 2], [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]) is None
    True
    """
    sign = 1 if higher else -1

    def merit(i: int) -> tuple[float, float]:
        around = [sign * scores[n] for n in neighbours(shape, i)]
        return sign * scores[i], statistics.fmean(around) if around else 0.0

    alive = [i for i in range(len(scores)) if not diverged[i]]
    alive = alive or [i for i, s in enumerate(scores) if math.isfinite(s) and s > 0]
    # max() keeps the first of equals.
    return max(alive, key=merit) if alive else None


def neighbours(shape: Sequence[int], point: int) -> list[int]:
    """The points one step away along one axis, the last axis running fastest.

    >>> neighbours([3, 3], 4), neighbours([3, 3], 0)
    ([1, 7, 3, 5], [3, 1])
    """
    found, stride = [], math.prod(shape)
    for size in shape:
        stride //= size
        position = point // stride % size
        found += [point + step * stride for step in (-1, 1) if 0 <= position + step < size]
    return found


def _described(
    axes: Mapping[str, Sequence[float]],
    points: Sequence[Mapping[str, float]],
    scores: Sequence[float],
    best: int,
) -> dict[str, Any]:
    edges = [
        key
        for key, values in axes.items()
        if len(values) > 1 and points[best][key] in (values[0], values[-1])
    ]
    around = neighbours([len(v) for v in axes.values()], best)
    return {
        "options": points[best],
        "score": scores[best],
        "neighbours": [{"options": points[n], "score": scores[n]} for n in around],
        "border": bool(edges),
        "border_axes": edges,
    }


def _summary(spec: GridSpec, task: Task, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "task": task.name,
        "label": spec.label,
        "metric": task.metric.name,
        "higher_is_better": task.metric.higher_is_better,
        "selection": spec.selection,
        "examples": task.test.size,
        "rounds": spec.rounds,
        "last": spec.last,
        "seeds": spec.seeds,
        "preset": dict(task.preset),
        "precision": spec.precision,
        "complete": len(found) == len(spec.algorithms),
        "algorithms": dict(found),
    }


def warnings(data: Mapping[str, Any]) -> list[str]:
    """What a reader of a grid has to know: best points on a border, grids that only diverged."""
    found = []
    for name, entry in data["algorithms"].items():
        best = entry["best"]
        if best is None:
            found.append(f"{name}: every point diverged; search smaller rates")
        elif best["border"]:
            edges = ", ".join(f"{key} = {best['options'][key]:.4g}" for key in best["border_axes"])
            found.append(
                f"{name}: the best lies on the border ({edges}); a wider grid may do better"
            )
    return found
