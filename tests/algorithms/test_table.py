"""The catalog of built-in algorithms."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedzmg import algorithms
from fedzmg.algorithms import ALGORITHMS, _modules
from fedzmg.contract import Algorithm


def test_every_row_describes_an_algorithm_and_every_algorithm_is_described() -> None:
    text = Path(algorithms.__file__).with_name("catalog.toml").read_text(encoding="utf-8")
    rows = {name: row for family in tomllib.loads(text).values() for name, row in family.items()}
    for name, row in rows.items():
        assert {field: getattr(ALGORITHMS[name], field) for field in row} == row
    assert rows.keys() == ALGORITHMS.keys()
    undescribed = [name for name, info in ALGORITHMS.items() if not (info.summary and info.source)]
    assert undescribed == []


def test_texts_of_built_in_algorithms_are_in_the_catalog_alone() -> None:
    """Modules define algorithms; ``AlgorithmInfo`` is for plugins, which have no catalog."""
    modules = [module for module in _modules() if hasattr(module, "ALGORITHMS")]
    assert len(modules) > 20
    for module in modules:
        assert not hasattr(module, "FAMILY")
        assert {type(own) for own in module.ALGORITHMS} == {Algorithm}
