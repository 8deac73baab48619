"""Weights & Biases, offline unless ``WANDB_MODE`` says otherwise."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from fedzmg.trackers.tracker import Ending, TrackedRun, kept_id


class WeightsAndBiases:
    """Writes ``tracking/wandb``; ``wandb sync`` sends it off, when and where the user likes."""

    _run: Any

    def start(self, run: TrackedRun) -> None:
        # Before the package is loaded: without being asked it reports its own crashes, too.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        run.place.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(run.place),
            project=os.environ.get("WANDB_PROJECT", "fedzmg"),
            group=run.project,
            name=run.name,
            # The same id after an interruption: pieces become one run when they are synced.
            id=kept_id(run, lambda: secrets.token_hex(8)),
            resume="allow",
            reinit="create_new",
            config=dict(run.settings),
            settings=wandb.Settings(
                mode=os.environ.get("WANDB_MODE", "offline"),
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, ending: Ending) -> None:
        self._run.finish(exit_code={"finished": 0, "stopped": 1}[ending])
