"""Table of the devices of deployed runs, and their health."""

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.report.tables.table import Column, Table
from fedzmg.results.study_result import StudyResult
from fedzmg.storage.formats import read_json

_COUNTS = ("rounds", "absent", "late", "refused", "lost")


def devices(result: StudyResult) -> Table | None:
    """Make the table of devices; None if no run was deployed."""
    items: list[tuple[str, int, dict[str, Any]]] = []
    for label, runs in result.study.members.items():
        for run in runs:
            path = Path(run.path) / "nodes.json"
            with contextlib.suppress(InputError, KeyError, TypeError):
                found = read_json(path)["nodes"] if run.path and path.is_file() else []
                items += [(label, run.seed, dict(node)) for node in found]
    if not items:
        return None

    def seen(item: Any) -> str:
        return f"{datetime.fromtimestamp(item[2]['last_seen'], UTC):%Y-%m-%d %H:%M:%S}"

    columns = [
        Column("algorithm", "algorithm", lambda item: item[0]),
        Column("device", "device", lambda item: str(item[2]["name"])),
        Column("last seen (UTC)", "last_seen", seen),
        Column("last refusal", "reason", lambda item: str(item[2]["reason"])),
        Column("seed", "seed", lambda item: item[1]),
        Column("client", "client", lambda item: item[2]["client"]),
        Column("examples", "examples", lambda item: item[2]["examples"]),
        *(Column(key, key, lambda item, key=key: item[2][key]) for key in _COUNTS),  # type: ignore[misc]
        Column("seconds", "seconds", lambda item: item[2]["seconds"], "{:.2f}".format),
    ]
    caption = (
        "rounds: answers that were used; absent: rounds without an answer in time; late: answers "
        "after the deadline; refused: answers that were wrong; lost: answers without the client's "
        "memory; seconds: of the last local training."
    )
    title = f"Devices of the federation on {result.study.name}"
    return Table.build("devices", title, columns, items, caption, words=4)
