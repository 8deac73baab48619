"""Tables, summaries and differences of everything in ``results/``, against frozen ones."""

from __future__ import annotations

import csv
import gzip
import io
import json
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


@pytest.mark.parametrize("name", sorted(FROZEN["report"]))
def test_tables_are_those_frozen(name: str) -> None:
    material = read([ROOT / "results" / name])
    outcomes = [study_result(study) for study in material.studies]
    found = {n: rows(b.decode()) for n, b in tables(material, outcomes) if n.endswith(".csv")}
    assert found == {n: rows(text) for n, text in FROZEN["report"][name]["tables"].items()}
