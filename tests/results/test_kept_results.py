"""Tables, summaries and differences of everything in ``results/``, against frozen ones."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedzmg.report.exports.report import tables
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result

ROOT = Path(__file__).parents[2]
FROZEN: dict[str, Any] = json.loads(
    gzip.decompress((ROOT / "tests/golden/kept_results.json.gz").read_bytes())
)


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def equal(cell: str, other: str) -> bool:
    """Compare texts, and numbers up to the rounding of another library."""
    try:
        return math.isclose(float(cell), float(other), rel_tol=1e-12, abs_tol=1e-12)
    except ValueError:
        return cell == other


@pytest.mark.parametrize("name", sorted(FROZEN["report"]))
def test_tables_are_those_frozen(name: str) -> None:
    material = read([ROOT / "results" / name])
    outcomes = [study_result(study) for study in material.studies]
    found = {n: rows(b.decode()) for n, b in tables(material, outcomes) if n.endswith(".csv")}
    frozen = {n: rows(text) for n, text in FROZEN["report"][name]["tables"].items()}
    assert found.keys() == frozen.keys()
    for table, expected in frozen.items():
        assert [len(row) for row in found[table]] == [len(row) for row in expected], table
        for row, other in zip(found[table], expected, strict=True):
            assert all(map(equal, row, other)), (table, row, other)
