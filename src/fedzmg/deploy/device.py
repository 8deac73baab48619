"""A device: it trains on its own data, and keeps its client's memory on its own disk."""

import time
import tomllib
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Listener
from pathlib import Path

import torch

from fedzmg import tasks
from fedzmg.data.federated import FederatedData
from fedzmg.deploy import codec
from fedzmg.deploy.blueprint import Blueprint, partition
from fedzmg.deploy.frames import UNKNOWN, Frame
from fedzmg.errors import InputError
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.plugins import load_reference
from fedzmg.storage import checkpoint as stored
from fedzmg.storage.files import remove_leftovers
from fedzmg.storage.formats import read_json, write_json
from fedzmg.tree import named_leaves, row

FORMAT = 1


class Device:
    """Answers the server's messages; one at a time.

    ``data`` is a task of ``fedzmg list``, or ``FILE.py:NAME`` of one's own; ``state`` is the
    directory of client memory.
    """

    def __init__(self, data: str, client: int, state: Path, device: torch.device) -> None:
        self.client, self._state, self._device = client, state, device
        self._preset = tasks.info(load_reference(data))
        self._preset.build()  # a mistake in the data ends the command
        self._built: tuple[Path, Blueprint] | None = None

    def answer(self, frame: Frame) -> Frame:
        """Answer a message; an error is an answer, too."""
        try:
            federation = str(frame.facts.get("federation", ""))
            if not federation.isalnum():  # it is the name of a folder here
                raise codec.BadMessage(f"federation = {federation[:40]!r}")
            path, kind = self._state / federation / str(self.client), frame.facts.get("kind")
            if kind == "refused":
                raise InputError(f"the server refuses this device: {frame.facts.get('reason')}")
            return self._hello(path, frame) if kind == "hello" else self._train(path, frame)
        except (InputError, codec.BadMessage, OSError) as error:
            return Frame({"error": str(error)[:500]})
        except Exception as error:  # of a user's own rule, model or task
            traceback.print_exc()
            return Frame({"error": f"{type(error).__name__} {error}"[:500]})

    def _hello(self, path: Path, frame: Frame) -> Frame:
        """Keep the federation's specification; describe the data of this device."""
        facts = {"format": FORMAT, **{k: frame.facts[k] for k in ("spec", "population")}}
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        write_json(path / "federation.json", facts)
        self._built = None
        blueprint = self._blueprint(path)
        own = blueprint.program.data
        alone = FederatedData(own.examples, own.offsets, ()).fingerprint()
        name, size = own.names[self.client], own.examples.size
        known = {"client": self.client, "name": name, "examples": size, "data": alone}
        return Frame({**known, "structure": blueprint.structure()})

    def _blueprint(self, path: Path) -> Blueprint:
        if self._built is None or self._built[0] != path:
            if not (path / "federation.json").exists():
                raise codec.BadMessage(UNKNOWN)
            facts = read_json(path / "federation.json", wanted=FORMAT)
            spec = RunSpec.parse(tomllib.loads(str(facts["spec"])))
            known = self._preset.options()
            options = {name: value for name, value in spec.preset.items() if name in known}
            task = self._preset.with_options(options).build()
            if len(task.train) > 1 and self.client >= len(task.train):
                held = f"{task.name} has {len(task.train)} partitions"
                raise InputError(f"client {self.client}: {held}")
            task = partition(task, self.client, int(facts["population"]))
            self._built = path, Blueprint.of(task, spec, self._device)
        return self._built[1]

    def _train(self, path: Path, frame: Frame) -> Frame:
        """Train, write the new memory, and only then answer."""
        began, facts = time.perf_counter(), frame.facts
        blueprint = self._blueprint(path)
        down = codec.decode(frame.arrays, blueprint.down)
        round_, base, times = (int(facts[key]) for key in ("round", "base", "occurrences"))
        memory, lost, binding = blueprint.memory, False, "/".join(path.parts[-2:])
        if base:
            try:
                file = path / f"memory-{base}.safetensors"
                found = stored.read_checkpoint(file, binding).tensors[0]
                memory = codec.decode({n: codec.wire(leaf) for n, leaf in found.items()}, memory)
            except (FileNotFoundError, stored.UnusableCheckpoint, codec.BadMessage):
                lost = True
        outcomes, after = blueprint.train(down, round_, self.client, times, memory)
        if named_leaves(after):
            kept = stored.StoredCheckpoint(round_, 0, {0: named_leaves(after)}, {}, {})
            stored.write_checkpoint(path / f"memory-{round_}.safetensors", kept, binding)
            # The server will not name others again.
            named = {f"memory-{int(r)}.safetensors" for r in (*facts["keep"], round_)}
            for file in path.glob("memory-*.safetensors"):
                if file.name not in named:
                    file.unlink(missing_ok=True)
        each = enumerate(codec.encode(row(outcomes, i)) for i in range(times))
        arrays = {f"{i}{name}": wire for i, own in each for name, wire in own.items()}
        answer = {key: facts[key] for key in ("federation", "round", "nonce")}
        seconds = time.perf_counter() - began
        return Frame({**answer, "client": self.client, "lost": lost, "seconds": seconds}, arrays)


def serve(listener: Listener, device: Device, say: Callable[[str], None]) -> None:
    """Answer the client apps of a device, until the listener is closed."""
    with suppress(OSError):
        while True:
            with listener.accept() as app:
                try:
                    answer = device.answer(Frame.receive(app))
                    answer.send(app)
                    if error := answer.facts.get("error"):
                        say(f"client {device.client}: {error}")
                except (OSError, EOFError, ValueError) as lost:
                    say(f"client {device.client}: lost a message: {type(lost).__name__} {lost}")
