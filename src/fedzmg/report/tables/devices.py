"""Table of the devices of deployed runs, and their health."""

import contextlib
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.report.tables.table import Column, Table
from fedzmg.results.study_result import StudyResult
from fedzmg.storage.formats import read_json

_HEADS = {"name": "device", "last_seen": "last seen (UTC)", "reason": "last refusal"}
_COUNTS = ("seed", "client", "examples", "rounds", "absent", "late", "refused", "lost", "seconds")


def devices(result: StudyResult) -> Table | None:
    """Make the table of devices; None if no run was deployed."""
    items: list[dict[str, Any]] = []
    for label, runs in result.study.members.items():
        for run in runs:
            path = Path(run.path) / "nodes.json"
            with contextlib.suppress(InputError, KeyError, TypeError):
                for node in read_json(path)["nodes"] if run.path and path.is_file() else []:
                    seen = f"{datetime.fromtimestamp(node['last_seen'], UTC):%Y-%m-%d %H:%M:%S}"
                    shown = {"last_seen": seen, "seconds": round(node["seconds"], 2)}
                    items.append({**node, **shown, "algorithm": label, "seed": run.seed})
    if not items:
        return None
    columns = [
        Column(_HEADS.get(key, key), key, itemgetter(key))
        for key in ("algorithm", *_HEADS, *_COUNTS)
    ]
    caption = (
        "rounds: answers that were used; absent: rounds without an answer in time; late: answers "
        "after the deadline; refused: answers that were wrong; lost: answers without the client's "
        "memory; seconds: of the last local training."
    )
    title = f"Devices of the federation on {result.study.name}"
    return Table.build("devices", title, columns, items, caption, words=4)
