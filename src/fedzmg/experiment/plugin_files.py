"""Hash of an algorithm's equations, which tells results of changed rules apart.

The hash covers the sources of the rules' classes, and of the functions, classes and numbers that
these use from their own package, ``fedzmg.algorithms`` or ``fedzmg.wrappers``. Comments and
docstrings do not count. Sources are the same in every process and for every version of Python;
compiled code is not.

Of algorithms and tasks from outside the package, a manifest also records file and hash.
"""

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

from fedzmg.aggregators import AGGREGATORS, table_of
from fedzmg.algorithms import ALGORITHMS
from fedzmg.contract import Algorithm, chain
from fedzmg.errors import InputError
from fedzmg.federation import Federation
from fedzmg.plugins import Origin
from fedzmg.storage.formats import read_json
from fedzmg.storage.reading import files_below
from fedzmg.tasks import TASKS
from fedzmg.tasks.task import Task
from fedzmg.wrappers.parts import PartsClient, PartsServer

FACT = "rules_sha256"  # manifest key of the hash; older manifests lack it
PLUGINS = "plugins"  # manifest key of files and hashes by name; absent without plugins


def rules_sha256(
    algorithm: Algorithm, task: Task | None = None, federation: Federation | None = None
) -> str | None:
    """Hash an algorithm's rules; None if a source cannot be read, as at a prompt."""
    # The parts of a task and the aggregator of a federation count like the algorithm's own.
    merged = algorithm.aggregator or (federation and federation.aggregator)
    rules = [*chain(algorithm.client), *chain(algorithm.server), *(chain(merged) if merged else ())]
    parts = (PartsClient, PartsServer) if algorithm.parts or (task and task.parts) else ()
    return _hash((*(type(rule) for rule in rules), *parts))


def code_facts(task: Task, trained: list[Algorithm], federation: Federation) -> dict[str, Any]:
    """Return what a manifest records of code: the hash of rules, and files outside the package."""
    merged = federation.aggregator
    used = [] if merged is None else [table_of(merged)["name"]]
    names = dict.fromkeys([*(algorithm.name for algorithm in trained), *used, task.name])
    known = _origins()
    plugins = {name: known[name].as_dict() for name in names if name in known}
    # Trials of a pack differ in numbers only.
    rules = rules_sha256(trained[0], task, federation)
    return {FACT: rules, **({PLUGINS: plugins} if plugins else {})}


def _origins() -> dict[str, Origin]:
    return {**AGGREGATORS.origins, **ALGORITHMS.origins, **TASKS.origins}


def say_changed(
    trained: Iterable[tuple[str, Algorithm, Path]], task: Task, federation: Federation, out: Path,
    say: Callable[[str], None], remedy: str = "choose another --out",
) -> None:  # fmt: skip
    """Report algorithms whose rules, or plugin file, changed since a directory's training."""
    changed, files = [], []
    for name, algorithm, directory in trained:
        path, now = directory / "manifest.json", rules_sha256(algorithm, task, federation)
        manifest = read_json(path) if path.is_file() else {}
        then = manifest.get(FACT)
        if None not in (then, now) and then != now:
            changed.append(name)
        else:
            recorded, known = manifest.get(PLUGINS, {}), _origins()
            # Of plugins that are loaded now.
            both = [(origin, known[name]) for name, origin in recorded.items() if name in known]
            files += [str(old["file"]) for old, new in both if old["sha256"] != new.sha256]
    for what, verb in ((changed, "rules have"), (files, "the file has")):
        if what:
            names = ", ".join(dict.fromkeys(what))
            say(f"{names}: {verb} changed since {out} was trained; {remedy}")


def refuse_unloaded(task: str | None, algorithms: Iterable[str], path: Path, call: str) -> None:
    """Refuse results of an unknown task or algorithm; ``call`` takes a task made in Python."""
    missing = [name for name in algorithms if name not in ALGORITHMS]
    missing += [] if task is None or task in TASKS else [task]
    if not missing:
        return
    name, recorded = missing[0], dict[str, Any]()
    for manifest in files_below(path if path.is_dir() else path.parent, "manifest.json"):
        recorded |= read_json(manifest).get(PLUGINS, {})
    if (origin := recorded.get(name)) is None and name == task:
        raise InputError(f"{path} is of {name!r}, a task made in Python: call {call}")
    kind = "task" if name == task else "algorithm"
    if origin is not None and "distribution" in origin:
        raise InputError(f"{path} is of {name!r} of {origin['distribution']}: install that package")
    remedy = f"pass --plugin {origin['file'] if origin else 'FILE.py'}, or call fedzmg.register"
    raise InputError(f"{path} is of the {kind} {name!r}, whose file runs if you name it: {remedy}")


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
    own = module.__name__.rpartition(".")[0] or module.__name__
    homes = own, "fedzmg.algorithms", "fedzmg.wrappers"
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
