"""Flower's server app: trains a run with the devices that the grid reaches."""

import os
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedzmg.deploy.flower import from_records, to_records
from fedzmg.deploy.frames import Frame
from fedzmg.deploy.processes import exit_with
from fedzmg.deploy.remote import Link, Reply
from fedzmg.deploy.server import DONE, PID, SETTINGS, Settings, train
from fedzmg.errors import InputError
from fedzmg.storage.files import write_atomic
from fedzmg.storage.formats import write_json


class GridLink(Link):
    """The nodes of Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self._nodes = grid, dict[str, int]()

    def online(self) -> set[int]:
        return set(self._grid.get_node_ids())

    def push(self, node: int, frame: Frame, seconds: float) -> str:
        message = Message(to_records(frame), node, "train", ttl=seconds)
        [sent] = map(str, self._grid.push_messages([message]))
        self._nodes[sent] = node
        return sent

    def pull(self, messages: Sequence[str]) -> list[Reply]:
        replies = []
        for sent in messages:  # one by one: no answer can pose as that of another node, or spoil it
            frame, error = None, ""
            try:
                found = list(self._grid.pull_messages([sent]))
                if not found:
                    continue
                if found[0].has_error():
                    error = str(found[0].error.reason or found[0].error.code)
                else:
                    frame = from_records(found[0].content)
            except Exception as raised:  # whatever its decoding raises
                error = f"{type(raised).__name__} {raised}"
            replies.append(Reply(sent, self._nodes.pop(sent), frame, error[:200]))
        return replies


def main(grid: Grid, _: Context) -> None:
    """Train the run that the settings name; leave its end to the launcher."""
    settings = Settings.read(Path(os.environ[SETTINGS]))
    home = Path(settings.home)
    write_atomic(home / PID, str(os.getpid()).encode())
    exit_with(settings.parent)
    said = ""
    try:
        train(GridLink(grid), settings)
    except InputError as error:
        said = str(error)
    write_json(home / DONE, {"error": said})


app = ServerApp()
app.main()(main)
