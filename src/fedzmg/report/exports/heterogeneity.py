"""Files of ``fedzmg data describe``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedzmg.report.figures import heterogeneity, save
from fedzmg.report.tables.table import Table, to_csv
from fedzmg.report.writing import write

STEM = "heterogeneity"
FILES = tuple(f"{STEM}.{suffix}" for suffix in ("json", "csv", "png", "svg"))


def write_description(
    report: Mapping[str, Any], paper: Mapping[str, Any] | None, folder: Path
) -> None:
    """Write everything as JSON, a line per client as CSV, and the figure.

    Args:
        report: dictionary of a :class:`fedzmg.data.heterogeneity.Report`.
        paper: the paper's numbers, marked beside the clients.
        folder: their directory; it is made.

    Raises:
        InputError: if a file cannot be written.
    """
    write(folder / f"{STEM}.json", (json.dumps(report, allow_nan=False) + "\n").encode())
    by_client = Table("", "", (), [], records=report["clients"])
    write(folder / f"{STEM}.csv", to_csv(by_client).encode())
    save(heterogeneity(report, paper), folder / STEM)
