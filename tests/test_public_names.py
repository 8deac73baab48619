"""Public names: rules and partitions can be imported from their packages."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import pytest

import fedzmg
from fedzmg import algorithms, data
from fedzmg.contract import ClientRule, ServerRule


def test_every_public_name_is_found_without_another_import() -> None:
    """The module's own function is called: other tests may have loaded the packages before."""
    for name in set(fedzmg.__all__) - {"__version__"}:
        assert fedzmg.__getattr__(name) is getattr(fedzmg, name)
    assert dir(fedzmg) == fedzmg.__all__
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fedzmg.simulat  # noqa: B018


def test_every_usable_rule_is_exported() -> None:
    rules = {
        name: thing
        for module in pkgutil.iter_modules(algorithms.__path__, "fedzmg.algorithms.")
        for name, thing in inspect.getmembers(import_module(module.name), inspect.isclass)
        if issubclass(thing, ClientRule | ServerRule) and getattr(thing, "__final__", False)
    }
    assert {"SGD", "Scaffold", "ClipNorm", "ServerDecay"} <= set(rules)
    for name, rule in rules.items():
        assert name in algorithms.__all__
        assert getattr(algorithms, name) is rule


def test_every_partition_is_exported() -> None:
    for name, partition in data.PARTITIONS.items():
        assert name in data.__all__
        assert getattr(data, name) is partition
