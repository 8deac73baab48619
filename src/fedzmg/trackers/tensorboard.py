"""TensorBoard: event files, a directory per run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedzmg.trackers.tracker import Ending, TrackedRun


class TensorBoard:
    """Writes ``tracking/tensorboard/RUN``; look with ``tensorboard --logdir`` at the first two."""

    _writer: Any

    def start(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What older files say of rounds from here on is then not shown any more.
        self._writer = SummaryWriter(str(run.place / run.name), purge_step=run.done + 1)
        rows = [f"| {key} | {value} |" for key, value in run.settings.items()]
        self._writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *rows]), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        # A process that is killed loses nothing of finished rounds.
        self._writer.flush()

    def finish(self, ending: Ending) -> None:
        del ending
        self._writer.close()
