"""Run directories, read back as plain data: only what is on disk, and nothing is trained.

A report may cover any mixture of directories. Runs belong to one study when they share the task,
its preset and protocol, and the data; within a study an algorithm with several settings stands
under several labels.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.errors import InputError

FORMAT = 1
"""Newest format of run directories that is understood."""
_VARIANT_TABLES = ("client", "server")
_VARIANT_KEYS = ("weights", "dtype", "precision")
_SUMMED = ("bytes_down", "bytes_up", "bytes_up_bound", "scalar_bytes_down", "scalar_bytes_up")
# Runs of one algorithm come before others with these names where nothing says which is meant.
_USUAL_REFERENCE = "fedzmg"


class Log(NamedTuple):
    """A run's metrics, in order of rounds; ``evaluated`` and what follows it go together."""

    rounds: tuple[int, ...]
    dropped: tuple[int, ...]
    diverged: int | None
    """The round in which the run diverged."""
    evaluated: tuple[int, ...]
    metrics: tuple[float, ...]
    moved: tuple[int, ...]
    """Bytes that moved until each evaluation, arrays and scalars, both ways."""
    traffic: Mapping[str, int]
    """Sums over rounds; ``total`` counts arrays and scalars both ways, ``kept`` is a client's."""
    seconds: float


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory."""

    place: str
    """Name of the given directory and the way from there, with forward slashes."""
    spec: Mapping[str, Any]
    manifest: Mapping[str, Any]
    log: Log
    plan: str = ""
    """Where the study is that it belongs to, if it was planned as part of one."""
    label: str = ""
    """What that study calls its algorithm."""

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self.spec["algorithm"])

    @property
    def seed(self) -> int:
        """The seed that pairs runs."""
        return int(self.spec["seed"])

    @property
    def asked(self) -> int | None:
        """Rounds that were asked for."""
        rounds = self.spec.get("protocol", {}).get("rounds")
        return None if rounds is None else int(rounds)

    @property
    def done(self) -> int:
        """Rounds in the log."""
        return self.log.rounds[-1] if self.log.rounds else 0

    @property
    def diverged(self) -> int | None:
        """The round in which it diverged."""
        return self.log.diverged

    @property
    def complete(self) -> bool:
        """Whether every round is there, or none is worth waiting for."""
        if self.diverged is not None:
            return True
        return bool(self.log.evaluated) and self.asked is not None and self.done >= self.asked


@dataclass(frozen=True, eq=False)
class Study:
    """Runs that may be compared with each other."""

    name: str
    task: str
    metric: str
    higher_is_better: bool
    thresholds: tuple[float, ...]
    """Levels to be reached; the last is the one that scores speak of first."""
    window: int
    """Evaluations that are averaged on the way to a threshold."""
    scheduled: bool
    """Whether the evaluation after the last round counts only if it was due anyway."""
    reference: str
    """Label of the algorithm that the others are tested against."""
    members: Mapping[str, tuple[Run, ...]]
    """Runs by label, reference first, in order of seeds."""
    notes: tuple[str, ...]

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [run for runs in self.members.values() for run in runs]

    @property
    def threshold(self) -> float | None:
        """The level that scores speak of first."""
        return self.thresholds[-1] if self.thresholds else None

    @property
    def protocol(self) -> Mapping[str, Any]:
        """What all runs share."""
        return dict(self.runs[0].spec.get("protocol", {}))


class Extra(NamedTuple):
    """A JSON file beside the runs."""

    place: str
    content: Mapping[str, Any]


class Material(NamedTuple):
    """All that a report is made of."""

    names: tuple[str, ...]
    """The given directories."""
    studies: tuple[Study, ...]
    grids: tuple[Extra, ...]
    heterogeneity: tuple[Extra, ...]
    plans: tuple[str, ...]
    """Files that say what was asked for: ``PLACE/study.toml``, ``PLACE/grid.toml``."""
    notes: tuple[str, ...]
    """What was left out, and why."""


def read(places: Sequence[Path]) -> Material:
    """Read every run, grid and heterogeneity file below some directories.

    Args:
        places: run directories, or directories that hold them at any depth.

    Raises:
        InputError: if a place is no directory, holds nothing to report, or holds damaged files.
    """
    runs: list[Run] = []
    found: dict[str, list[Extra]] = {"grid.json": [], "heterogeneity.json": []}
    comparisons: list[Mapping[str, Any]] = []
    plans: dict[str, Mapping[str, Any]] = {}
    files: list[str] = []
    notes: list[str] = []
    for place in places:
        before = len(runs) + len(notes) + sum(map(len, found.values()))
        if not place.is_dir():
            raise InputError(f"{place} is no directory: give one that holds runs")
        for directory, shown in _walk(place):
            files += [
                f"{shown}/{kind}.toml"
                for kind in ("grid", "study")
                if (directory / f"{kind}.toml").is_file()
            ]
            if (directory / "study.json").is_file():
                plans[shown] = _read_json(directory / "study.json")
            if (directory / "spec.toml").is_file():
                run = _planned(_read_run(directory, shown, notes), plans)
                runs += [] if run is None else [run]
            for file, extras in found.items():
                if (directory / file).is_file():
                    extras.append(Extra(shown, _read_json(directory / file)))
            if (directory / "comparison.json").is_file():
                comparisons.append(_read_json(directory / "comparison.json"))
        if len(runs) + len(notes) + sum(map(len, found.values())) == before:
            raise InputError(
                f"{place} holds no run directory (spec.toml), grid.json or heterogeneity.json: "
                "give a directory that 'fedzmg run', 'compare' or 'study' wrote"
            )
    return Material(
        tuple(_name(place) for place in places),
        tuple(_studies(runs, comparisons, plans, notes)),
        tuple(found["grid.json"]),
        tuple(found["heterogeneity.json"]),
        tuple(files),
        tuple(notes),
    )


def read_log(path: Path) -> Log:
    """Read a ``metrics.jsonl``; of lines for the same round the last counts.

    Raises:
        InputError: for a damaged line; one that a crash broke off is no damage.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    by_round = _at_once(lines)
    if by_round is None:
        by_round = _one_by_one(lines, path)
    records = [by_round[round_] for round_ in sorted(by_round)]
    try:
        return _log(records)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} lacks or garbles a field ({error}): restore or remove it"
        ) from None


def _at_once(lines: Sequence[bytes]) -> dict[int, dict[str, Any]] | None:
    """All lines in one go, which is much faster; None if any of them needs a closer look."""
    try:
        return {values["round"]: values for values in json.loads(b"[" + b",".join(lines) + b"]")}
    except (ValueError, TypeError, KeyError):
        return None


def _one_by_one(lines: Sequence[bytes], path: Path) -> dict[int, dict[str, Any]]:
    by_round: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            by_round[values["round"]] = values
        except (ValueError, TypeError, KeyError):
            if number == len(lines) or not line.endswith(b"}"):
                continue
            raise InputError(f"{path}, line {number} is damaged: restore or remove it") from None
    return by_round


def _log(records: Sequence[Mapping[str, Any]]) -> Log:
    evaluated = [record for record in records if record.get("metric") is not None]
    last = records[-1] if records else {}
    traffic = {name: sum(record[name] for record in records) for name in _SUMMED}
    traffic["kept"] = last.get("bytes_kept", 0)
    traffic["total"] = _moved(last) if records else 0
    return Log(
        rounds=tuple(int(record["round"]) for record in records),
        dropped=tuple(int(record["dropped"]) for record in records),
        diverged=next((int(r["round"]) for r in records if r.get("diverged")), None),
        evaluated=tuple(int(record["round"]) for record in evaluated),
        # What is not finite is written as a word, which float() reads.
        metrics=tuple(float(record["metric"]) for record in evaluated),
        moved=tuple(_moved(record) for record in evaluated),
        traffic=traffic,
        seconds=sum(float(record["seconds"]) for record in records),
    )


def _moved(record: Mapping[str, Any]) -> int:
    return int(record["total_bytes_down"]) + int(record["total_bytes_up"])


def _walk(place: Path) -> Iterator[tuple[Path, str]]:
    """Directories at and below a place in a fixed order, each with the name it is shown under."""
    top = _name(place)
    for current, below, _ in os.walk(place):
        below[:] = sorted(name for name in below if not name.startswith("."))
        directory = Path(current)
        rest = directory.relative_to(place).as_posix()
        yield directory, top if rest == "." else f"{top}/{rest}"


def _name(place: Path) -> str:
    """What a directory is called, also where it is given as ``.``."""
    return place.resolve().name or "root"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore or remove it") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object: restore or remove it")
    return values


def _read_run(directory: Path, shown: str, notes: list[str]) -> Run | None:
    try:
        spec = tomllib.loads((directory / "spec.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{directory / 'spec.toml'} cannot be read ({error}): restore or remove it"
        ) from None
    lacking = [key for key in ("task", "algorithm", "seed") if key not in spec]
    if lacking:
        raise InputError(f"{directory / 'spec.toml'} lacks {lacking[0]!r}: restore or remove it")
    if not (directory / "manifest.json").is_file():
        notes.append(f"{shown} has no manifest.json: a number without its circumstances is no use")
        return None
    manifest = _read_json(directory / "manifest.json")
    if not isinstance(manifest.get("format"), int) or manifest["format"] > FORMAT:
        raise InputError(
            f"{directory / 'manifest.json'} has format {manifest.get('format')!r}, this version "
            f"reads up to {FORMAT}: report with the version that wrote it"
        )
    log = read_log(directory / "metrics.jsonl")
    if not log.rounds:
        notes.append(f"{shown} has no finished round yet")
        return None
    return Run(shown, spec, manifest, log)


def _planned(run: Run | None, plans: Mapping[str, Mapping[str, Any]]) -> Run | None:
    """A run, and what the study around it calls it."""
    if run is None:
        return None
    for place, plan in plans.items():
        for label, entry in plan.get("algorithms", {}).items():
            if run.place == f"{place}/{entry.get('directory')}/seed-{run.seed}":
                return replace(run, plan=place, label=label)
    return run


def _studies(
    runs: Iterable[Run],
    comparisons: Sequence[Mapping[str, Any]],
    plans: Mapping[str, Mapping[str, Any]],
    notes: list[str],
) -> list[Study]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps([run.plan, _shared(run)], sort_keys=True), []).append(run)
    tasks = []
    for group in groups.values():
        remark = plans.get(group[0].plan, {}).get("label")
        tasks.append(f"{group[0].spec['task']}, {remark}" if remark else group[0].spec["task"])
    names = _told_apart(tasks, [_flat(_shared(group[0])) for group in groups.values()])
    found = []
    for name, group in zip(names, groups.values(), strict=True):
        task = group[0].spec["task"]
        compared: Mapping[str, Any] = next((c for c in comparisons if c.get("task") == task), {})
        found.append(_study(name, group, plans.get(group[0].plan, compared), notes))
    return found


def _study(name: str, runs: Sequence[Run], plan: Mapping[str, Any], notes: list[str]) -> Study:
    """A study; ``plan`` is its ``study.json`` or ``comparison.json``, if there is one."""
    members = _members(runs, notes)
    listed = plan.get("algorithms", {})
    # A comparison has a list of rows, a study a table by label.
    order = list(listed) if isinstance(listed, Mapping) else [row["algorithm"] for row in listed]

    def position(label: str) -> tuple[int, bool, str]:
        known = label if label in order else members[label][0].algorithm
        place = order.index(known) if known in order else len(order)
        return place, known != _USUAL_REFERENCE, label

    labels = sorted(members, key=position)
    metric, higher, assumed = _metric(runs[0].manifest, plan)
    levels = plan.get("thresholds") or []
    thresholds = [float(level["threshold"]) for level in levels]
    own = runs[0].spec.get("protocol", {}).get("threshold")
    if not thresholds and own is not None:
        thresholds = [float(own)]
    return Study(
        name=name,
        task=str(runs[0].spec["task"]),
        metric=metric,
        higher_is_better=higher,
        thresholds=tuple(sorted(thresholds, reverse=not higher)),
        window=int(plan.get("window", 4)),
        scheduled=isinstance(listed, Mapping) and bool(listed),
        reference=labels[0],
        members={label: members[label] for label in labels},
        notes=(assumed,) if assumed else (),
    )


def _metric(manifest: Mapping[str, Any], comparison: Mapping[str, Any]) -> tuple[str, bool, str]:
    """Name and direction of the metric, and what had to be assumed about them."""
    found = manifest.get("metric", comparison.get("metric"))
    if isinstance(found, Mapping):
        return str(found["name"]), bool(found.get("higher_is_better", True)), ""
    higher = bool(manifest.get("higher_is_better", comparison.get("higher_is_better", True)))
    if found is not None:
        return str(found), higher, ""
    return "metric", higher, "The runs do not name their metric; more is taken to be better."


def _members(runs: Sequence[Run], notes: list[str]) -> dict[str, tuple[Run, ...]]:
    """Runs by label; of two with the same settings and seed the first stays."""
    by_algorithm: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        variants = by_algorithm.setdefault(run.label or run.algorithm, {})
        seeds = variants.setdefault(json.dumps(variant(run), sort_keys=True), {})
        if run.seed in seeds:
            kept = seeds[run.seed].place
            notes.append(f"{run.place} repeats {kept} (same settings and seed): it is left out")
            continue
        seeds[run.seed] = run
    members = {}
    for algorithm, variants in by_algorithm.items():
        labels = _told_apart([algorithm] * len(variants), [json.loads(text) for text in variants])
        for label, seeds in zip(labels, variants.values(), strict=True):
            members[label] = tuple(seeds[seed] for seed in sorted(seeds))
    return members


def variant(run: Run) -> dict[str, Any]:
    """What distinguishes settings of one algorithm: ``client.lr`` and so on."""
    tables = {name: run.spec[name] for name in _VARIANT_TABLES if name in run.spec}
    own = {key: run.spec[key] for key in _VARIANT_KEYS if key in run.spec}
    return _flat(tables) | own


def _shared(run: Run) -> dict[str, Any]:
    """What runs of one study have in common."""
    hashes = {name: run.manifest.get(name) for name in ("data_sha256", "task_sha256")}
    tables = {name: run.spec.get(name, {}) for name in ("preset", "protocol")}
    return {"task": run.spec["task"], **tables, **hashes}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = value.items() if isinstance(value, Mapping) else None
        flat |= {key: value} if inner is None else {f"{key}.{name}": v for name, v in inner}
    return flat


def _told_apart(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names, and where one occurs twice, the facts in which its owners differ."""
    out = []
    for name, own in zip(names, facts, strict=True):
        rivals = [other for rival, other in zip(names, facts, strict=True) if rival == name]
        keys = dict.fromkeys(key for other in rivals for key in other)
        differ = [key for key in keys if any(other.get(key) != own.get(key) for other in rivals)]
        told = ", ".join(f"{key.rpartition('.')[2]} {_short(own.get(key))}" for key in differ)
        out.append(f"{name} ({told})" if told else name)
    return out


def _short(value: Any) -> str:
    """A value in a label; a hash needs no more than its beginning."""
    if value is None:
        return "default"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text[:8] if len(text) == 64 else text
