"""What an algorithm's equations are, as a hash: numbers of other equations are other numbers.

It is taken of the sources of the rules' classes, and of the functions, classes and numbers that
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedzmg.contract import Algorithm, chain
from fedzmg.experiment.runs.store import RunDirectory
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.storage.formats import read_json
from fedzmg.tasks.task import Task

FACT = "rules_sha256"
"""What a manifest calls the hash; of the first rules, if they changed while it trained."""
CHANGES = "rules_changes"
"""What it calls later ones: each with the first round that it trained."""
_LIBRARY = "fedzmg.algorithms"


class PlannedRun(NamedTuple):
    """A run, and where it is or will be."""

    name: str
    """What its algorithm is called."""
    spec: RunSpec
    place: Path


def rules_sha256(algorithm: Algorithm) -> str | None:
    """The hash of an algorithm's rules; None where a source cannot be read, as at a prompt."""
    rules = (*chain(algorithm.client), *chain(algorithm.server))
    return _hash(tuple(type(rule) for rule in rules))


def have_changed(algorithm: Algorithm, place: Path) -> bool:
    """Whether a directory was trained by other rules than an algorithm has now.

    Nobody knows, and nothing is said, where there is no hash: in manifests of older versions.
    """
    path, now = place / "manifest.json", rules_sha256(algorithm)
    facts = read_json(path) if path.is_file() else {}
    then = {facts.get(FACT), *(change[FACT] for change in facts.get(CHANGES, []))} - {None}
    return now is not None and bool(then - {now})


def gone_on(
    facts: Mapping[str, Any], algorithm: Algorithm, done: int, pack: int | None = None
) -> dict[str, Any]:
    """A manifest once training goes on: if rules have changed, it says from which round on.

    Args:
        facts: the manifest so far.
        algorithm: by whose rules the next rounds train.
        done: rounds that are kept; changes in later ones, which are trained again, are forgotten.
        pack: which trials they are, in a grid, whose packs train one after another.
    """
    first, now = facts.get(FACT), rules_sha256(algorithm)
    if first is None or now is None:
        return dict(facts)
    if done == 0 and pack is None:
        first = now
    changes = facts.get(CHANGES, [])
    kept = [c for c in changes if c.get("pack") != pack or c["round"] <= done]
    own = [c[FACT] for c in kept if c.get("pack") == pack]
    if (own or [first])[-1] != now:
        which = {} if pack is None else {"pack": pack}
        kept.append({**which, "round": done + 1, FACT: now})
    others = {key: value for key, value in facts.items() if key != CHANGES}
    return {**others, FACT: first, **({CHANGES: kept} if kept else {})}


def say_changed(names: Iterable[str], out: Path, say: Callable[[str], None]) -> None:
    """Say in a line which algorithms have other rules now; nothing if none has.

    Args:
        names: of algorithms, as they are shown.
        out: what was trained before.
        say: told.
    """
    found = list(dict.fromkeys(names))
    if found:
        whose = "its" if len(found) == 1 else "their"
        say(
            f"{', '.join(found)}: {whose} rules have changed since {out} was trained: another "
            "--out trains anew"
        )


def say_changed_runs(
    task: Task, runs: Iterable[PlannedRun], out: Path, say: Callable[[str], None]
) -> None:
    """The same for runs that are to be taken up again.

    Another run in the place of one is no change of rules; it will be refused.
    """
    changed = []
    for name, spec, place in runs:
        directory = RunDirectory(place)
        if directory.exists and have_changed(spec.build_algorithm(task), place):
            changed += [name] if directory.spec() == spec.resolved(task) else []
    say_changed(changed, out, say)


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
    """Sources of classes, and of everything of ours that they use, each once."""
    seen: list[Any] = []
    left = list(kinds)
    while left:
        one = left.pop(0)
        if one in seen:
            continue
        seen.append(one)
        tree = ast.parse(text := _source(one))
        yield _bare(text, tree)
        for name, value in _used(tree, sys.modules[one.__module__]):
            if isinstance(value, int | float | str):
                yield f"{name} = {value!r}"
            else:
                left.append(value)


@functools.cache
def _source(one: Any) -> str:
    return textwrap.dedent(inspect.getsource(one))


def _used(tree: ast.AST, module: ModuleType) -> list[tuple[str, Any]]:
    """Functions, classes and numbers of ours that a source names, in the order of their names."""
    home = module.__name__.rpartition(".")[0] or module.__name__
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in vars(module):
            name, value = node.id, vars(module)[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name, owner = f"{node.value.id}.{node.attr}", vars(module).get(node.value.id)
            if not isinstance(owner, ModuleType) or not _is_in(owner.__name__, home):
                continue
            value = getattr(owner, node.attr, None)
        else:
            continue
        if isinstance(value, int | float | str):
            found[name] = value
        elif callable(value):
            value = inspect.unwrap(value)
            written = inspect.isfunction(value) or inspect.isclass(value)
            if written and _is_in(value.__module__, home):
                found[name] = value
    return sorted(found.items(), key=lambda pair: pair[0])


def _is_in(module: str, home: str) -> bool:
    """Whether a module's code belongs to the equations of rules that are at home in a package."""
    return any(f"{module}.".startswith(f"{place}.") for place in (home, _LIBRARY))


def _bare(text: str, tree: ast.AST) -> str:
    """A source without docstrings, lines of comments and empty lines."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            if isinstance(node.value.value, str) and not lines[first][: node.col_offset].strip():
                lines[first:last] = [""] * (last - first)
    kept = (line.rstrip() for line in lines)
    return "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))
