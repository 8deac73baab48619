"""Every algorithm: one module per paper, and the table made from these modules.

A module that defines ``ALGORITHMS``, a tuple of :class:`AlgorithmInfo`, is a part of the table
without further edits. All final rule classes of the package can be imported from here.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedzmg.algorithms.projection import zero_mean
from fedzmg.contract import Algorithm, AlgorithmInfo, Rule
from fedzmg.errors import unknown

_FIRST = (
    "fedzmg", "fedavg", "fedadam", "fedavgm", "fedyogi", "fedadagrad", "fedadadb", "hybrids",
    "gradient_centralization", "mfl", "fedgbo", "fedlion", "fedcada", "fedadap", "fedprox",
    "scaffold", "feddyn", "mimelite", "adabest",
)  # fmt: skip
"""Modules that come first in the table, in this order; others follow by name."""


def _modules() -> list[ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    return [import_module(f"{__name__}.{name}") for name in names]


def _rules(module: ModuleType) -> dict[str, type[Rule]]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Rule)
        and value.__module__ == module.__name__
        and getattr(value, "__final__", False)
    }


ALGORITHMS: dict[str, AlgorithmInfo] = {
    info.algorithm.name: dataclasses.replace(
        info, about=module.__doc__ or "", family=getattr(module, "FAMILY", "others")
    )
    for module in _modules()
    for info in getattr(module, "ALGORITHMS", ())
}
_RULES = {name: rule for module in _modules() for name, rule in _rules(module).items()}
globals().update(_RULES)
__all__ = ["ALGORITHMS", "AlgorithmInfo", "get", "zero_mean", *sorted(_RULES)]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Let type checkers accept the names of rules, which are found at run time."""


def get(name: str) -> Algorithm:
    """Return the algorithm of that name with its default hyper-parameters.

    Raises:
        InputError: if there is none; the nearest name is suggested.
    """
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise unknown("algorithm", str(name), ALGORITHMS, "fedzmg list")
    return ALGORITHMS[name].algorithm
