"""Every algorithm: one module per paper, and the table made from these modules.

A module that defines ``ALGORITHMS`` is a part of the table without further edits; so is a user's
plugin file (:mod:`fedzmg.plugins`). Family, summary, source and costs of the package's algorithms
are in ``catalog.toml``, those of a plugin in an :class:`AlgorithmInfo` in place of the algorithm.
All final rule classes of the package can be imported from here.
"""

import dataclasses
import inspect
import pkgutil
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedzmg.contract import Algorithm, AlgorithmInfo, Rule, chain
from fedzmg.errors import InputError
from fedzmg.plugins import Registry
from fedzmg.wrappers.projection import zero_mean

_FIRST = (  # in the table; other modules follow by name
    "fedzmg", "fedavg", "fedadam", "fedavgm", "fedyogi", "fedadagrad", "fedadadb", "hybrids",
    "gradient_centralization", "mfl", "fedgbo", "fedlion", "fedcada", "fedadap", "fedprox",
    "scaffold", "feddyn", "mimelite", "adabest",
)  # fmt: skip


def _modules() -> list[ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    return [import_module(f"{__name__}.{name}") for name in names]


def _rules(module: ModuleType) -> dict[str, type[Rule]]:
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    final = {n: v for n, v in own.items() if isinstance(v, type) and getattr(v, "__final__", False)}
    return {name: value for name, value in final.items() if issubclass(value, Rule)}


def _entry(value: Any, name: str, module: ModuleType | None) -> tuple[str, AlgorithmInfo]:
    """Make a row of the table; ``module`` describes it."""
    if isinstance(value, Algorithm):
        summary = inspect.getdoc(type(value.client)) or ""
        value = AlgorithmInfo(value, summary=summary.partition("\n")[0], source="")
    if not isinstance(value, AlgorithmInfo):
        raise InputError(f"{value!r:.80}: expected an Algorithm or an AlgorithmInfo of one")
    if module is not None:
        value = dataclasses.replace(value, about=value.about or module.__doc__ or "")
    if name and name != value.algorithm.name:
        named = dataclasses.replace(value.algorithm, name=name)
        value = dataclasses.replace(value, algorithm=named)
    return value.algorithm.name, value


def _same(old: AlgorithmInfo, new: AlgorithmInfo) -> bool:
    """Return True for equal rules, and for rules that a notebook defines once more."""
    if old.algorithm == new.algorithm:
        return True
    both = old.algorithm, new.algorithm
    kinds = [[type(rule) for rule in (*chain(a.client), *chain(a.server))] for a in both]
    names = [[(kind.__module__, kind.__qualname__) for kind in own] for own in kinds]
    typed = any(home == "__main__" for home, _ in names[0])
    return typed and kinds[0] != kinds[1] and names[0] == names[1]


def _built_in() -> Iterator[tuple[str, AlgorithmInfo]]:
    catalog: dict[str, dict[str, Any]] = {}
    for path in (Path(folder, "catalog.toml") for folder in __path__):
        for family, rows in tomllib.loads(path.read_text(encoding="utf-8")).items():
            catalog |= {name: {"family": family, **row} for name, row in rows.items()}
    for module in _modules():
        for own in getattr(module, "ALGORITHMS", ()):
            if isinstance(own, Algorithm) and own.name in catalog:
                own = AlgorithmInfo(own, **catalog[own.name])
            yield _entry(own, "", module)


ALGORITHMS: Registry[AlgorithmInfo] = Registry("algorithm", dict(_built_in()), _entry, _same)
_WRAPPERS = [import_module(f"fedzmg.wrappers.{name}") for name in ("clip", "schedule", "wrapper")]
_RULES = {name: rule for home in (*_modules(), *_WRAPPERS) for name, rule in _rules(home).items()}
globals().update(_RULES)
__all__ = ["ALGORITHMS", "AlgorithmInfo", "get", "zero_mean", *sorted(_RULES)]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Let type checkers accept the names of rules, which are found at run time."""


def get(name: str) -> Algorithm:
    """Return the algorithm of that name with its defaults; for an unknown one suggest a name."""
    return ALGORITHMS.look_up(name).algorithm
