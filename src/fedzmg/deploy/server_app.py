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

app = ServerApp()


class GridLink(Link):
    """The nodes of Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def online(self) -> set[int]:
        return set(self._grid.get_node_ids())

    def push(self, node: int, frame: Frame, seconds: float) -> str:
        message = Message(to_records(frame), node, "train", ttl=seconds)
        [sent] = self._grid.push_messages([message])
        return sent

    def pull(self, messages: Sequence[str]) -> list[Reply]:
        return [self._read(one) for one in self._grid.pull_messages(messages)] if messages else []

    def _read(self, message: Message) -> Reply:
        about = message.metadata.reply_to_message_id, message.metadata.src_node_id
        if message.has_error():
            return Reply(*about, None, f"{message.error.reason or message.error.code}"[:200])
        try:
            return Reply(*about, from_records(message.content))
        except ValueError as error:
            return Reply(*about, None, str(error))


@app.main()
def main(grid: Grid, _: Context) -> None:
    """Train the run that the settings name; leave its end to the launcher."""
    settings = Settings.read(Path(os.environ[SETTINGS]))
    home = Path(settings.home)
    write_atomic(home / PID, str(os.getpid()).encode())
    exit_with(settings.parent)
    try:
        train(GridLink(grid), settings)
    except InputError as error:
        write_json(home / DONE, {"error": str(error)})
    else:
        write_json(home / DONE, {"error": ""})
