"""A device: it trains on its own data, and keeps its client's memory on its own disk."""

import re
import socket
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedzmg import tasks
from fedzmg.data.federated import FederatedData
from fedzmg.deploy import codec
from fedzmg.deploy.blueprint import Blueprint, Down, partition
from fedzmg.deploy.frames import Frame, Wire, receive_frame, send_frame
from fedzmg.errors import InputError
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.plugins import load_reference
from fedzmg.storage import checkpoint as stored
from fedzmg.storage.files import remove_leftovers
from fedzmg.storage.formats import read_json, write_json
from fedzmg.tasks.task import Task
from fedzmg.tree import State, named_leaves, row
from fedzmg.version import __version__

FORMAT = 1
MOST_OCCURRENCES = 100
"""Local trainings in one message at most."""
_FEDERATION = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class KeptMemory:
    """Memory of one client in one federation, a sealed file per round that the server may name."""

    path: Path
    binding: str

    def _file(self, round_: int) -> Path:
        return self.path / f"memory-{round_}.safetensors"

    def read(self, round_: int, fresh: State) -> State | None:
        """Read the memory after a round; None if it is missing or damaged."""
        if round_ == 0:
            return fresh
        with suppress(FileNotFoundError, stored.UnusableCheckpoint, codec.BadMessage):
            found = stored.read_checkpoint(self._file(round_), self.binding).tensors[0]
            return codec.decode({name: codec.wire(leaf) for name, leaf in found.items()}, fresh)
        return None

    def write(self, round_: int, memory: State, keep: set[int]) -> None:
        """Write the memory after a round; remove those that the server will not name again."""
        named = {0: named_leaves(memory)}
        found = stored.StoredCheckpoint(round_, 0, named, {}, {})
        stored.write_checkpoint(self._file(round_), found, self.binding)
        for file in self.path.glob("memory-*.safetensors"):
            number = file.stem.removeprefix("memory-")
            if not number.isdecimal() or int(number) not in keep | {round_}:
                file.unlink(missing_ok=True)


class Device:
    """Answers the server's messages; one at a time.

    Args:
        data: a task of ``fedzmg list``, or ``FILE.py:NAME`` of one's own.
        client: number of the client in the federation.
        state: directory of client memory.
        device: where to train.
    """

    def __init__(self, data: str, client: int, state: Path, device: torch.device) -> None:
        self.name, self.client = load_reference(data), client
        self._state, self._device = state, device
        self._preset = tasks.info(self.name)
        self._built: tuple[str, Blueprint] | None = None

    def answer(self, frame: Frame) -> Frame:
        """Answer a message; an error is an answer, too."""
        try:
            federation = str(frame.facts.get("federation"))
            if not _FEDERATION.fullmatch(federation):
                raise codec.BadMessage(f"federation = {federation[:40]!r}")
            kind = self._hello if frame.facts.get("kind") == "hello" else self._train
            return kind(federation, frame)
        except (InputError, codec.BadMessage, OSError) as error:
            return Frame({"error": str(error)[:500], "client": self.client})
        except Exception as error:  # of a user's own rule, model or task
            traceback.print_exc()
            return Frame({"error": f"{type(error).__name__} {error}"[:500], "client": self.client})

    def _path(self, federation: str) -> Path:
        return self._state / federation / str(self.client)

    def _hello(self, federation: str, frame: Frame) -> Frame:
        """Keep the federation's specification; describe the data of this device."""
        facts = {"format": FORMAT, **{k: frame.facts[k] for k in ("spec", "population")}}
        path = self._path(federation)
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        write_json(path / "federation.json", facts)
        self._built = None
        blueprint = self._blueprint(federation)
        own = blueprint.program.data
        alone = FederatedData(own.examples, own.offsets, ()).fingerprint()
        return Frame(
            {
                "client": self.client,
                "name": own.names[self.client],
                "examples": own.examples.size,
                "data": alone,
                "structure": blueprint.structure(),
                "fedzmg": __version__,
                "torch": torch.__version__,
            }
        )

    def _blueprint(self, federation: str) -> Blueprint:
        if self._built is None or self._built[0] != federation:
            path = self._path(federation) / "federation.json"
            if not path.exists():
                raise codec.BadMessage(f"federation {federation} is unknown here")
            facts = read_json(path, wanted=FORMAT)
            spec = RunSpec.parse(tomllib.loads(str(facts["spec"])))
            task = partition(self._task(spec.preset), self.client, int(facts["population"]))
            self._built = federation, Blueprint.of(task, spec, self._device)
        return self._built[1]

    def _task(self, preset: Mapping[str, Any]) -> Task:
        own = isinstance(self._preset, tasks.OwnTask)
        task = self._preset.build() if own else self._preset.with_options(preset).build()
        if len(task.train) > 1 and self.client >= len(task.train):
            raise InputError(f"client {self.client}: {task.name} has {len(task.train)} partitions")
        return task

    def _train(self, federation: str, frame: Frame) -> Frame:
        """Train, write the new memory, and only then answer."""
        began, facts = time.perf_counter(), frame.facts
        blueprint = self._blueprint(federation)
        down = codec.decode(frame.arrays, blueprint.down)
        round_, base, times = (int(facts[key]) for key in ("round", "base", "occurrences"))
        if not (0 <= base < round_ and 1 <= times <= MOST_OCCURRENCES):
            raise codec.BadMessage(f"round {round_} after {base}, {times} occurrences")
        kept = KeptMemory(self._path(federation), f"{federation} {self.client}")
        memory = kept.read(base, blueprint.memory)
        lost = memory is None
        outcomes, after = blueprint.train(
            Down(*down), round_, self.client, times, blueprint.memory if lost else memory
        )
        if named_leaves(after):
            kept.write(round_, after, {int(r) for r in facts["keep"]})
        arrays: dict[str, Wire] = {}
        for i in range(times):
            arrays |= {f"{i}{name}": w for name, w in codec.encode(row(outcomes, i)).items()}
        answer = {key: facts[key] for key in ("federation", "round", "nonce")}
        seconds = time.perf_counter() - began
        return Frame({**answer, "client": self.client, "lost": lost, "seconds": seconds}, arrays)


def serve(path: str, device: Device, say: Callable[[str], None]) -> None:
    """Answer frames at a Unix socket, until the process ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    answer = device.answer(receive_frame(connection))
                    send_frame(connection, answer)
                    if error := answer.facts.get("error"):
                        say(f"refused a message: {error}")
                except (OSError, ValueError):
                    say(f"lost a message: {traceback.format_exc(limit=1).splitlines()[-1]}")
