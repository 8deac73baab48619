"""Flower's server app: trains a run with the devices that the grid reaches."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedzmg.deploy.flower import from_records, to_records
from fedzmg.deploy.frames import Frame
from fedzmg.deploy.processes import exit_with
from fedzmg.deploy.remote import Limits, Link, Reply
from fedzmg.deploy.server import CUT, DONE, PID, SETTINGS, Settings, train
from fedzmg.errors import InputError
from fedzmg.storage.files import write_atomic
from fedzmg.storage.formats import read_json, write_json


class GridLink(Link):
    """The nodes of Flower's grid.

    Messages are pulled one by one, so no answer can pose as that of another node or spoil it, and
    in threads: Flower waits minutes for an answer that was announced and is not complete.
    """

    def __init__(self, grid: Grid, cut: Path) -> None:
        self._grid, self._nodes, self._cut = grid, dict[str, int](), cut.open("a+")
        self._pool, self._pulled = ThreadPoolExecutor(256), dict[str, Future[Reply | None]]()

    def online(self) -> set[int]:
        return set(self._grid.get_node_ids())

    def push(self, node: int, frame: Frame, seconds: float) -> str:
        message = Message(to_records(frame), node, "train", ttl=seconds)
        [sent] = map(str, self._grid.push_messages([message]))
        self._nodes[sent] = node
        return sent

    def pull(self, messages: Sequence[str]) -> list[Reply]:
        for sent in set(messages) - self._pulled.keys():
            self._pulled[sent] = self._pool.submit(self._pull, sent)
        wait([self._pulled[sent] for sent in messages], timeout=1)
        done = [self._pulled.pop(sent) for sent in messages if self._pulled[sent].done()]
        return [reply for one in done if (reply := one.result()) is not None]

    def cut_off(self) -> set[int]:
        return set(map(int, self._cut))

    def _pull(self, sent: str) -> Reply | None:
        frame, error = None, ""
        try:
            found = list(self._grid.pull_messages([sent]))
            if not found:
                return None
            if found[0].has_error():
                error = str(found[0].error.reason or found[0].error.code)
            else:
                frame = from_records(found[0].content)
        except Exception as raised:  # whatever its decoding raises
            error = f"{type(raised).__name__} {raised}"
        return Reply(sent, self._nodes.pop(sent), frame, error[:200])


def main(grid: Grid, _: Context) -> None:
    """Train the run that the settings name; leave its end to the launcher."""
    found = read_json(Path(os.environ[SETTINGS]))
    settings = Settings(**{**found, "limits": Limits(*found["limits"])})
    home = Path(settings.home)
    write_atomic(home / PID, str(os.getpid()).encode())
    exit_with(settings.parent)
    said = ""
    try:
        train(GridLink(grid, home / CUT), settings)
    except InputError as error:
        said = str(error)
    write_json(home / DONE, {"error": said})


app = ServerApp()
app.main()(main)
