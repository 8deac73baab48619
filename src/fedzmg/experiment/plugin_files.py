"""Files of algorithms, aggregators and tasks from outside the package, as manifests record them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedzmg.aggregators import AGGREGATORS, table_of
from fedzmg.algorithms import ALGORITHMS
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError
from fedzmg.federation import Federation
from fedzmg.plugins import Origin
from fedzmg.storage.formats import read_json
from fedzmg.storage.reading import files_below
from fedzmg.tasks import TASKS
from fedzmg.tasks.task import Task

PLUGINS = "plugins"  # manifest key of files and hashes by name; absent without plugins


def plugin_facts(task: Task, trained: list[Algorithm], federation: Federation) -> dict[str, Any]:
    """Return what a manifest records of files outside the package."""
    merged = federation.aggregator
    used = [] if merged is None else [table_of(merged)["name"]]
    names = dict.fromkeys([*(algorithm.name for algorithm in trained), *used, task.name])
    known = _origins()
    plugins = {name: known[name].as_dict() for name in names if name in known}
    return {PLUGINS: plugins} if plugins else {}


def _origins() -> dict[str, Origin]:
    return {**AGGREGATORS.origins, **ALGORITHMS.origins, **TASKS.origins}


def say_changed(
    trained: Iterable[Path], out: Path, say: Callable[[str], None],
    remedy: str = "choose another --out",
) -> None:  # fmt: skip
    """Report plugin files that changed since the training of directories."""
    files, known = dict[str, None](), _origins()
    for path in (directory / "manifest.json" for directory in trained):
        recorded = read_json(path).get(PLUGINS, {}) if path.is_file() else {}
        # Of plugins that are loaded now.
        both = [(origin, known[name]) for name, origin in recorded.items() if name in known]
        files |= {str(old["file"]): None for old, new in both if old["sha256"] != new.sha256}
    if files:
        say(f"{', '.join(files)}: the file has changed since {out} was trained; {remedy}")


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
