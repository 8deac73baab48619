"""Hash of an algorithm's equations, which tells results of changed rules apart.

The hash covers the sources of the rules' classes, and of the functions, classes and numbers that
these use from their own package or from ``fedzmg.algorithms``. Comments and docstrings do not
count. Sources are the same in every process and for every version of Python; compiled code is not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fedzmg.contract import Algorithm, chain
from fedzmg.storage.formats import read_json

FACT = "rules_sha256"
"""Manifest key of the hash; older manifests lack it."""


def rules_sha256(algorithm: Algorithm) -> str | None:
    """Hash an algorithm's rules; None if a source cannot be read, as at a prompt."""
    merged = chain(algorithm.aggregator) if algorithm.aggregator is not None else []
    rules = (*chain(algorithm.client), *chain(algorithm.server), *merged)
    return _hash(tuple(type(rule) for rule in rules))


def say_changed(
    trained: Iterable[tuple[str, Algorithm, Path]], out: Path, say: Callable[[str], None]
) -> None:
    """Report algorithms, by displayed name, whose rules have changed since a directory's training.

    Only a directory with a manifest has been trained.
    """
    changed = []
    for name, algorithm, directory in trained:
        path, now = directory / "manifest.json", rules_sha256(algorithm)
        then = read_json(path).get(FACT) if path.is_file() else None
        if None not in (then, now) and then != now:
            changed.append(name)
    if changed:
        names = ", ".join(dict.fromkeys(changed))
        say(f"{names}: rules have changed since {out} was trained; choose another --out")


@functools.cache
def _hash(kinds: tuple[type, ...]) -> str | None:
    digest = hashlib.sha256()
    try:
        for part in _parts(kinds):
            digest.update(part.encode() + b"\x1f")
    except (OSError, TypeError, SyntaxError):  # typed in, or made by a program
        return None
    return digest.hexdigest()


def _parts(kinds: Iterable[Any]) -> Iterator[str]:
    """Yield the sources of classes and of everything of ours that they use, each once."""
    left = list(dict.fromkeys(kinds))
    for one in left:  # which grows meanwhile
        tree = ast.parse(text := _source(one))
        yield _bare(text, tree)
        for name, value in _used(tree, sys.modules[one.__module__]):
            if isinstance(value, int | float | str):
                yield f"{name} = {value!r}"
            elif value not in left:
                left.append(value)


@functools.cache
def _source(one: Any) -> str:
    return textwrap.dedent(inspect.getsource(one))


def _used(tree: ast.AST, module: ModuleType) -> list[tuple[str, Any]]:
    """Return functions, classes and numbers of ours that a source names, sorted by name."""
    homes = module.__name__.rpartition(".")[0] or module.__name__, "fedzmg.algorithms"
    found: dict[str, Any] = {}

    def is_ours(name: str) -> bool:
        return any(f"{name}.".startswith(f"{home}.") for home in homes)

    for node in ast.walk(tree):
        name, value = "", None
        if isinstance(node, ast.Name):
            name, value = node.id, vars(module).get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name, owner = f"{node.value.id}.{node.attr}", vars(module).get(node.value.id)
            if isinstance(owner, ModuleType) and is_ours(owner.__name__):
                value = getattr(owner, node.attr, None)
        value = inspect.unwrap(value) if callable(value) else value
        written = inspect.isfunction(value) or inspect.isclass(value)
        if isinstance(value, int | float | str) or (written and is_ours(value.__module__)):
            found[name] = value
    return sorted(found.items(), key=lambda pair: pair[0])


def _bare(text: str, tree: ast.AST) -> str:
    """Strip docstrings, comment lines and empty lines from a source."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            if isinstance(node.value.value, str) and not lines[first][: node.col_offset].strip():
                lines[first:last] = [""] * (last - first)
    kept = (line.rstrip() for line in lines)
    return "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))
