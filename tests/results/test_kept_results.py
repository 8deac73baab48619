"""Tables and differences of everything in ``results/``, against frozen ones."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedzmg.report.exports import tables
from fedzmg.results.diff import compare
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result

ROOT = Path(__file__).parents[2]
FROZEN: dict[str, Any] = json.loads(
    gzip.decompress((ROOT / "tests/golden/kept_results.json.gz").read_bytes())
)


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def equal(one: Any, other: Any) -> bool:
    """Compare JSON values or texts, and numbers up to the rounding of another library."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-12, abs_tol=1e-12)
    except (ValueError, TypeError):
        return bool(one == other)


@pytest.mark.parametrize("name", sorted(FROZEN["report"]))
def test_tables_are_those_frozen(name: str) -> None:
    material, frozen = read([ROOT / "results" / name]), FROZEN["report"][name]
    results = [study_result(study) for study in material.studies]
    found = {n: rows(b.decode()) for n, b in tables(material, results) if n.endswith(".csv")}
    assert found.keys() == frozen["tables"].keys()
    for table, text in frozen["tables"].items():
        assert equal(found[table], rows(text)), table
    kept = ROOT / "results" / name / "study.json"
    if kept.exists():
        assert equal(json.loads(json.dumps(results[0].as_dict())), json.loads(kept.read_text()))


@pytest.mark.parametrize("both", sorted(FROZEN["diff"]))
def test_differences_are_those_frozen(both: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    left, right = (Path("results") / name for name in both.split())
    found = json.loads(json.dumps(compare(left, right).as_dict()))
    assert equal({key: found[key] for key in FROZEN["diff"][both]}, FROZEN["diff"][both])
