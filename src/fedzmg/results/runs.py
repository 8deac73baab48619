"""One run directory, read back as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.results.clients import Clients, read_clients
from fedzmg.storage.formats import flat, log_lines, read_json, read_toml

FORMAT = 1
"""Newest format of run directories that is understood."""
_VARIANT_TABLES = ("client", "server")
_VARIANT_KEYS = ("weights", "dtype", "precision")
_UNSAID = {"precision": "float32"}
"""What older files do not say, because there was nothing else."""
_SUMMED = ("bytes_down", "bytes_up", "bytes_up_bound", "scalar_bytes_down", "scalar_bytes_up")


class Log(NamedTuple):
    """A run's metrics, in order of rounds; ``evaluated`` and what follows it go together.

    Rounds count from 1, as in the files. Shown is the index of an evaluated round, one less.
    """

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
    client_loss: tuple[Sequence[float] | None, ...] = ()
    """Training losses over the clients of each round: least, 10 %, median, 90 %, most."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory."""

    place: str
    """Name of the given directory and the way from there, with forward slashes."""
    path: str
    """The directory as the user's own path leads to it."""
    spec: Mapping[str, Any]
    manifest: Mapping[str, Any]
    log: Log
    plan: str = ""
    """Where the study is that it belongs to, if it was planned as part of one."""
    label: str = ""
    """What that study calls its algorithm."""
    clients: Clients | None = None
    """How its models did on single clients, if it was looked at."""

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

    @property
    def variant(self) -> dict[str, Any]:
        """What distinguishes settings of one algorithm: ``client.lr`` and so on."""
        tables = {name: self.spec[name] for name in _VARIANT_TABLES if name in self.spec}
        said = {**_UNSAID, **self.spec}
        own = {key: said[key] for key in _VARIANT_KEYS if key in said}
        return flat(tables) | own

    @property
    def shared(self) -> dict[str, Any]:
        """What runs of one study have in common."""
        hashes = {name: self.manifest.get(name) for name in ("data_sha256", "task_sha256")}
        tables = {name: self.spec.get(name, {}) for name in ("preset", "protocol")}
        return {"task": self.spec["task"], **tables, **hashes}


def read_run(directory: Path, shown: str, notes: list[str]) -> Run | None:
    """Read a directory that holds a ``spec.toml``; None, and a note, if there is nothing to show.

    Raises:
        InputError: if a file is damaged or of a newer format.
    """
    spec = read_toml(directory / "spec.toml")
    lacking = [key for key in ("task", "algorithm", "seed") if key not in spec]
    if lacking:
        raise InputError(f"{directory / 'spec.toml'} lacks {lacking[0]!r}: restore or remove it")
    if not (directory / "manifest.json").is_file():
        notes.append(f"{shown} has no manifest.json: a number without its circumstances is no use")
        return None
    manifest = read_json(directory / "manifest.json")
    if not isinstance(manifest.get("format"), int) or manifest["format"] > FORMAT:
        raise InputError(
            f"{directory / 'manifest.json'} has format {manifest.get('format')!r}, this version "
            f"reads up to {FORMAT}: report with the version that wrote it"
        )
    log = read_log(directory / "metrics.jsonl")
    if not log.rounds:
        notes.append(f"{shown} has no finished round yet")
        return None
    path = directory.as_posix()
    return Run(shown, path, spec, manifest, log, clients=read_clients(directory))


def read_log(path: Path) -> Log:
    """Read a ``metrics.jsonl``; of lines for the same round the last counts.

    Raises:
        InputError: for a damaged line; one that a crash broke off is no damage.
    """
    by_round = dict(log_lines(path, _with_its_round))
    records = [by_round[round_] for round_ in sorted(by_round)]
    try:
        return _log(records)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} lacks or garbles a field ({error}): restore or remove it"
        ) from None


def _with_its_round(values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return int(values["round"]), values


def _log(records: Sequence[Mapping[str, Any]]) -> Log:
    evaluated = [record for record in records if record.get("metric") is not None]
    last = records[-1] if records else {}
    traffic = {name: sum(map(itemgetter(name), records)) for name in _SUMMED}
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
        client_loss=tuple(_losses(record.get("client_loss")) for record in records),
    )


def _losses(values: Sequence[float | str] | None) -> Sequence[float] | None:
    return None if values is None else tuple(map(float, values))


def _moved(record: Mapping[str, Any]) -> int:
    return int(record["total_bytes_down"]) + int(record["total_bytes_up"])
