"""Run directories: their files (listed in docs/guide.md), manifests, and repair after a crash.

The format number changes when older versions would misread a directory. New fields of the log and
new files do not change it: readers ignore unknown fields and do without missing ones.
"""

import functools
import hashlib
import os
import platform
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

from fedzmg.contract import chain
from fedzmg.engine.client_memory import DamagedMemory, check_memory
from fedzmg.errors import InputError
from fedzmg.experiment.plugin_files import plugin_facts
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.models.layout import not_projected
from fedzmg.participation import Participation
from fedzmg.provenance import provenance
from fedzmg.simulation import Checkpoint, ClientMetrics, Record, Simulation
from fedzmg.storage import checkpoint as stored
from fedzmg.storage import files, formats, lock
from fedzmg.storage.client_metrics import read_clients, write_clients
from fedzmg.storage.formats import SPEC, append_log, log_lines, read_json, write_json
from fedzmg.storage.reading import check_folder
from fedzmg.tasks.task import Task

FORMAT = 1
NEWEST = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
LOG = "metrics.jsonl"
NODES = "nodes.json"


class Position(NamedTuple):
    """The checkpoint that a run continues from."""

    checkpoint: Checkpoint
    before: int  # round of the checkpoint before this one
    rejected: str = ""  # the reason why a newer checkpoint is not used


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk."""

    path: Path

    @property
    def exists(self) -> bool:
        """True if a run was created; files of a crashed creation do not count."""
        names = {found.name for found in self.path.iterdir()} if self.path.is_dir() else set()
        return any(name[0] != "." for name in names - {"manifest.json", lock.NAME, NODES})

    def create(self, spec: RunSpec, manifest: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        content = spec.to_toml().encode()
        bound = {**manifest, SPEC: hashlib.sha256(content).hexdigest()}
        write_json(self.path / "manifest.json", bound)
        # The specification comes last: a directory that has it is complete.
        files.write_atomic(self.path / "spec.toml", content)

    def spec(self) -> RunSpec:
        """Read the specification of a directory that holds plain files only."""
        check_folder(self.path)
        if not (self.path / "spec.toml").is_file():
            inside = [f", such as {p.parent}" for p in self.path.glob("*/seed-*/spec.toml")]
            run = f"a run directory{min(inside, default='')}"
            raise InputError(f"{self.path} holds no spec.toml: pass {run}")
        return RunSpec.read(self.path / "spec.toml")

    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.path)

    def append(self, record: Record) -> None:
        append_log(self.path / LOG, [record.line()])

    def records(self) -> list[Record]:
        """Read the log in order of rounds; a later line supersedes an earlier one."""
        by_round = {record.round: record for record in log_lines(self.path / LOG, _record)}
        return [by_round[round_] for round_ in sorted(by_round)]

    @functools.cached_property
    def _binding(self) -> str:
        return stored.bound_to(self.path / "spec.toml")

    def save(self, checkpoint: Checkpoint, before: int = 0, memory: str = "") -> None:
        """Write a checkpoint and its mark of client memory; keep the newest, of ``before``, too."""
        logs, tensors = files.log_marks(self.path, LOG), {0: checkpoint.tensors}
        found = stored.StoredCheckpoint(checkpoint.round, before, tensors, logs, {0: memory})
        path, previous = self.path / NEWEST, self.path / PREVIOUS
        stored.write_checkpoint(path, found, self._binding, keep=previous)

    def save_clients(self, found: Sequence[ClientMetrics]) -> None:
        write_clients(self.path, found)

    def clients(self, until: int | None = None) -> tuple[ClientMetrics, ...]:
        """Read evaluations of single clients in order of rounds, up to round ``until``."""
        return tuple(one for one in read_clients(self.path) if until is None or one.round <= until)

    def position(
        self, logged: Container[int] | None = None, until: int | None = None
    ) -> Position | None:
        """Read the newest usable checkpoint, ``logged`` and up to round ``until``; None without."""
        reasons = []
        for path in (self.path / NEWEST, self.path / PREVIOUS):
            try:
                # Reading the binding needs a specification, so a missing file comes first.
                if not path.exists():
                    raise FileNotFoundError
                found = stored.read_checkpoint(path, self._binding)
                if until is not None and found.round > until:
                    raise stored.UnusableCheckpoint(f"it is of round {found.round}")
                if logged is not None and any(r not in logged for r in range(1, found.round + 1)):
                    raise stored.UnusableCheckpoint(f"{LOG} lacks rounds before {found.round}")
                if files.changed_log(self.path, found.logs):
                    raise stored.UnusableCheckpoint(f"{LOG} is damaged or of another run")
                check_memory(self.path, found.round, found.memory[0])
            except FileNotFoundError:
                reasons.append(f"{path} is missing")
            except (stored.UnusableCheckpoint, DamagedMemory) as error:
                reasons.append(f"{path} cannot be used ({error})")
            else:
                checkpoint = Checkpoint(found.round, dict(found.tensors[0]))
                return Position(checkpoint, found.previous, "; ".join(reasons))
        if until is not None or all(reason.endswith(" is missing") for reason in reasons):
            return None
        remedy = "restore one of them, or remove both to start again from round 1"
        raise InputError(f"{'; '.join(reasons)}: {remedy}")

    def checkpoint(self) -> Checkpoint | None:
        """Read the newest checkpoint; None before the first one."""
        found = self.position()
        if found is None:
            return None
        # A crash between the two renames leaves only the previous one, which is then the newest.
        if found.rejected and (self.path / NEWEST).exists():
            remedy = f"train again, which continues from round {found.checkpoint.round}"
            raise InputError(f"{found.rejected}: {remedy}")
        return found.checkpoint

    def repair(self, position: Position | None) -> None:
        """Remove leftovers of a crash and damaged checkpoints before training continues."""
        if not self.path.is_dir():
            return
        # Without a run, the directory may be somebody else's.
        files.remove_leftovers(self.path, *([] if self.exists else ["manifest.json", "spec.toml"]))
        if position is None:
            # No checkpoint needs the client memory, which a crash may have left incomplete.
            for name in (NEWEST, PREVIOUS, "memory.rows", "memory.stamps"):
                (self.path / name).unlink(missing_ok=True)
        elif position.rejected:
            os.replace(self.path / PREVIOUS, self.path / NEWEST)
            files.sync_directory(self.path)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest with everything that a training is continued or repeated by."""
    facts = formats.read_manifest(directory, FORMAT)
    for name in ("data_sha256", "engine", "onednn", "device"):
        if name not in facts:
            raise InputError(f"{directory}/manifest.json lacks {name!r}: restore it")
    return facts


def describe_training(simulation: Simulation) -> dict[str, Any]:
    """Describe versions, machine, data, execution path and the trials of a pack."""
    device, task = simulation.device, simulation.task
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    sides = [side for t in simulation.trials for side in (t.algorithm.client, t.algorithm.server)]
    projects = any(hasattr(rule, "axes") for side in sides for rule in chain(side))
    unprojected = not_projected(task.model.layout) if projects else ""
    choice = simulation.choice
    beside = {"parallel": choice.parallel} if choice.parallel > 1 else {}
    beside |= {"channels_last": True} if choice.channels_last else {}
    return {
        "format": FORMAT, **provenance(), "started": timestamp(),
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "platform": platform.platform(), "device": device.type, "device_name": name,
        "threads": choice.threads or torch.get_num_threads(), **beside,
        "dtype": str(simulation.dtype).removeprefix("torch."), "precision": simulation.precision,
        "deterministic": simulation.deterministic, "engine": choice.path, "onednn": choice.onednn,
        "engine_reason": choice.reason, "chunk": simulation.chunk,
        "pack": member_names(simulation), **({"not_projected": unprojected} if unprojected else {}),
        "metric": task.metric.name, "higher_is_better": task.metric.higher_is_better,
        "preset": dict(task.preset), "clients": len(task.train),
        "examples": task.train.examples.size, "data_sha256": task.train.fingerprint(),
        "task_sha256": task.fingerprint(),
        **plugin_facts(task, [t.algorithm for t in simulation.trials], simulation.federation),
    }  # fmt: skip


def timestamp() -> str:
    """Return the current time as a manifest records it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def member_names(simulation: Simulation) -> list[str]:
    """Name the trials of a pack by directory in a study, else by algorithm."""
    names = [files.folder_name(trial.name) or trial.algorithm.name for trial in simulation.trials]
    return [f"{n}/seed-{t.seed}" for n, t in zip(names, simulation.trials, strict=True)]


def change_manifest(directory: Path, **facts: Any) -> None:
    """Change facts of a manifest; None removes a fact."""
    path = directory / "manifest.json"
    before = read_json(path)
    after = {k: v for k, v in {**before, **facts}.items() if k not in facts or v is not None}
    if after != before:
        write_json(path, after)


def note_change(directory: Path, name: str, change: Mapping[str, Any]) -> None:
    """Record a change of the pack (of this number, in a grid) in place of later ones."""
    kept = [
        one
        for one in read_json(directory / "manifest.json").get(name, [])
        if one["round"] < change["round"]
        or (isinstance(one.get("pack"), int) and one["pack"] != change.get("pack"))
    ]
    change_manifest(directory, **{name: [*kept, change]})


def clients_at_once(
    facts: Mapping[str, Any], task: Task, trials: int, participation: Participation
) -> int | None:
    """Return the number of clients that trained at once; None if it does not affect results."""
    most = participation.most_clients(task.protocol.cohort, len(task.train))
    # On a GPU another width changes the last bits, so all clients at once is a number there.
    everyone = trials * most if facts["device"] == "cuda" else None
    return facts["chunk"] if facts.get("chunk") is not None else everyone


def refuse_other_task(directory: Path, facts: Mapping[str, Any], task: Task) -> None:
    """Refuse to continue with other data, or another model, test set or metric."""
    for name, now_, what in (
        ("data_sha256", task.train.fingerprint(), "other data"),
        ("task_sha256", task.fingerprint(), "another model, test set or metric"),
    ):
        if facts.get(name, now_) != now_:
            now_has = f"{what} than {task.name!r} has now"
            raise InputError(f"{directory} was trained with {now_has}: choose another --out")


def export_model(run: Path, to: Path | None = None) -> Path:
    """Write the model of a run's newest checkpoint as a state dict in safetensors.

    The file loads with ``safetensors.torch.load_file`` and ``module.load_state_dict``. It does not
    hold frozen parameters (``strict=False``). A finished run without the checkpoint of its last
    round raises ``InputError``.
    """
    directory = RunDirectory(run)
    spec = directory.spec()
    checkpoint = directory.checkpoint()
    if checkpoint is None:
        raise InputError(f"{run} holds no checkpoint: train it, or use the original of a kept copy")
    if "finished" in formats.read_manifest(run, FORMAT):
        last = directory.records()[-1].round
        if checkpoint.round < last:
            problem = f"{run} lacks the checkpoint of its last round, {last}"
            raise InputError(f"{problem}: train again to restore it")
    path = to or run / "model.safetensors"
    facts = {"format": "pt", "task": spec.task, "algorithm": spec.algorithm}
    facts |= {"seed": str(spec.seed), "round": str(checkpoint.round)}
    with files.naming_errors(path, "choose another --to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, safetensors.torch.save(dict(checkpoint.params().items()), facts))
    return path


def _record(values: dict[str, Any]) -> Record:
    """Restore logged values: a tuple from a list, a number from a word."""
    known = {name: value for name, value in values.items() if name in Record._fields}
    for name, value in known.items():
        if name in ("rejected", "flagged"):
            known[name] = tuple((str(client), float(ratio)) for client, ratio in value)
        elif name == "client_loss" and value is not None:
            known[name] = tuple(map(float, value))
        elif isinstance(value, str):
            known[name] = float(value)
        elif not isinstance(value, float | None):  # counts and flags
            int(value)
    return Record(**known)
