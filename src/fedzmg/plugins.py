"""Code from outside the package: plugin files, installed packages, and the tables they extend.

A plugin file is a Python file with a tuple ``ALGORITHMS``, ``TASKS``, ``AGGREGATORS`` or
``TRACKERS``, like the modules of this package. Installed packages use entry points of the groups
``fedzmg.algorithms``, ``fedzmg.tasks``, ``fedzmg.aggregators`` and ``fedzmg.trackers``. Code is
loaded only when a user names it, never because a folder of results does.
"""

import contextlib
import functools
import hashlib
import os
import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from fedzmg.errors import InputError, UserCodeError, check_text, unknown

T = TypeVar("T")


class PluginError(Exception):
    """A user's code that raised while it was loaded; the cause has its traceback."""


class Origin(NamedTuple):
    """Source of something that the package does not bring."""

    file: str  # name of its file, without directory
    sha256: str  # hash of the file, and of files beside it that it imports
    distribution: str = ""  # name and version of an installed package

    @classmethod
    def of(cls, *files: Path, distribution: str = "") -> "Origin":
        """Hash files, of which the first gives the name."""
        content = b"".join(file.read_bytes() for file in files)
        return cls(files[0].name, hashlib.sha256(content).hexdigest(), distribution)

    def as_dict(self) -> dict[str, str]:
        """Return what a manifest records."""
        return {key: value for key, value in self._asdict().items() if value}

    def __str__(self) -> str:
        return f"{self.distribution}, {self.file}" if self.distribution else self.file


class Plugin(NamedTuple):
    """A plugin file that was loaded."""

    path: Path
    module: ModuleType
    files: tuple[Path, ...]  # the file, and files beside it that it imports
    origin: Origin


_PLUGINS: dict[str, Plugin] = {}  # loaded plugin files by name, which results record
REGISTRIES: "list[Registry[Any]]" = []  # all tables; one that is made later takes what is loaded


@contextlib.contextmanager
def user_code(what: str, file: str = "") -> Iterator[None]:
    """Name a user's file or package in errors of its code; ``file`` adds the line of a mistake."""
    try:
        yield
    except InputError as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        where = f"{what}, line {lines[-1]}" if lines else what
        own = isinstance(error, UserCodeError)  # its cause is shown
        raise type(error)(f"{where}: {error}") from (error.__cause__ if own else error)
    except SystemExit:
        remedy = 'put that part under if __name__ == "__main__"'
        raise InputError(f"{what} ends the program: {remedy}") from None
    except Exception as error:
        raise PluginError(f"{what} raised {type(error).__name__} while it was loaded") from error


def loaded_files() -> tuple[Path, ...]:
    """Return the plugin files of this process, for another one to load."""
    return tuple(plugin.path for plugin in _PLUGINS.values())


def load(path: Path | str) -> Plugin:
    """Run a plugin file once, and add what it defines to all tables; its error is a PluginError."""
    path = Path(path)
    if path.suffix != ".py" or (path.exists() and not path.is_file()):
        raise InputError(f"plugin {path}: expected a Python file, NAME.py")
    try:
        source, path = path.read_bytes(), path.resolve()
    except OSError as error:
        raise InputError(f"plugin {path}: {error.strerror}; check the path") from None
    known = _PLUGINS.get(path.name)
    if known is not None and known.path != path:
        raise InputError(f"plugins {known.path} and {path} have the same name: rename one")
    if known is not None and Origin.of(*known.files) == known.origin:
        return known
    # A file that was edited meanwhile is another module: rules that exist keep their own.
    name = f"fedzmg_plugin_{path.stem}_{hashlib.sha256(source).hexdigest()[:8]}"
    module, before, beside = ModuleType(name), set(sys.modules), str(path.parent)
    module.__file__ = str(path)
    sys.modules[name] = module
    sys.path.append(beside)  # last: nothing beside it hides an installed package
    try:
        with user_code(str(path), str(path)):
            exec(compile(source, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(beside)
    imported = [getattr(sys.modules[new], "__file__", None) for new in sys.modules.keys() - before]
    others = {Path(file) for file in imported if file and Path(file).parent == path.parent}
    files = (path, *sorted(others - {path}))
    plugin = Plugin(path, module, files, Origin.of(*files))
    for registry in REGISTRIES:
        if known is not None:
            registry.remove(known.origin)
        registry.take_all(plugin)
    _PLUGINS[path.name] = plugin
    return plugin


def split_reference(name: object) -> tuple[str, str] | None:
    """Split ``FILE.py:NAME``; None for another name."""
    file, _, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    return (file, attribute) if file.endswith(".py") and attribute.isidentifier() else None


def load_reference(name: str, base: Path | None = None) -> str:
    """Load the file of ``PATH.py:NAME``, relative to ``base``; return ``FILE.py:NAME``."""
    found = split_reference(name)
    if found is None:
        if str(name).endswith(".py"):
            raise InputError(f"{name!r} is a file: add the name of a thing in it, as {name}:NAME")
        return name
    return f"{load((base or Path()) / found[0]).path.name}:{found[1]}"


def options_for(origins: Iterable[Origin | None]) -> list[str]:
    """Return the options ``--plugin FILE.py`` that load these files again."""
    names = dict.fromkeys(origin.file for origin in origins if origin is not None)
    paths = [os.path.relpath(_PLUGINS[name].path) for name in names if name in _PLUGINS]
    return [word for path in paths for word in ("--plugin", path)]


class Registry(UserDict[str, T]):
    """Table of things by name: the package's own, those of plugins, and installed ones.

    Installed ones are known without being imported; they are imported when they are looked up.
    Iteration covers only what is imported. ``FILE.py:NAME`` is a name, too, once FILE.py is loaded.

    Args:
        kind: the thing in a word, such as ``algorithm``.
        entries: the package's own.
        convert: makes an entry of ``(value, name, module)``; returns it with its name. An empty
            name means the value's own. A wrong value is an ``InputError``.
        same: compares two entries of one name; true if the new one may replace the other.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, T],
        convert: Callable[[Any, str, ModuleType | None], tuple[str, T]],
        same: Callable[[T, T], bool],
    ) -> None:  # fmt: skip
        super().__init__(entries)
        self.kind, self._convert, self._same = kind, convert, same
        self.origins: dict[str, Origin] = {}
        REGISTRIES.append(self)
        for plugin in _PLUGINS.values():
            self.take_all(plugin)

    @functools.cached_property
    def installed(self) -> dict[str, metadata.EntryPoint]:
        """Entry points of installed packages by name; nothing is imported."""
        points = metadata.entry_points(group=f"fedzmg.{self.kind}s")
        return {point.name: point for point in points if point.name not in self.data}

    @property
    def not_imported(self) -> dict[str, str]:
        """Installed things that were not imported, with the names of their packages."""
        points = sorted(self.installed.items())
        return {name: _distribution(point) for name, point in points if name not in self.data}

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self.installed or _referred(name) is not None

    def __missing__(self, name: str) -> T:
        if (found := _referred(name)) is not None:
            plugin, value = found
            return self.take(value, plugin.origin, plugin.module, name)
        if name not in self.installed:
            raise KeyError(name)
        point = self.installed[name]
        distribution = _distribution(point)
        with user_code(f"{self.kind} {name!r} of {distribution or point.value}"):
            value = point.load()
        module = sys.modules[point.module]
        origin = Origin.of(Path(str(module.__file__)), distribution=distribution)
        return self.take(value, origin, module, name)

    def look_up(self, name: object) -> T:
        """Return the entry of that name; raise an ``InputError`` that suggests the nearest one."""
        if isinstance(name, str) and name in self:
            return self[name]
        if (found := split_reference(name)) is not None:
            file, own = found
            if file in _PLUGINS:
                raise InputError(f"{file} defines no {own!r}: correct {self.kind} {name}")
            raise InputError(f"unknown {self.kind} {name!r}: name its file with --plugin {file}")
        listing = "fedzmg list --aggregators" if self.kind == "aggregator" else "fedzmg list"
        error = unknown(self.kind, str(name), [*self.data, *self.installed], listing)
        if self.origins:
            raise error
        files, listed = ", ".join(_PLUGINS), f"{self.kind}s".upper()
        more = f"{files} lists no {listed}" if files else "--plugin FILE.py loads your own"
        raise InputError(f"{error}; {more}")

    def take(
        self, value: Any, origin: Origin | None, module: ModuleType | None = None, name: str = ""
    ) -> T:
        """Add something, and return its entry; another one of the same name is an error."""
        name, entry = self._convert(value, name, module)
        check_text(self.kind, name)
        if name in self.data and not self._same(self.data[name], entry):
            where = self.origins.get(name, "the package")
            raise InputError(f"{self.kind} {name!r} exists already ({where}): choose another name")
        self.data[name] = entry
        if origin is not None:
            self.origins[name] = origin
        return entry

    def remove(self, origin: Origin) -> None:
        """Remove everything of a file that was edited."""
        for name in [name for name, own in self.origins.items() if own == origin]:
            del self.data[name], self.origins[name]

    def take_all(self, plugin: Plugin) -> None:
        listed = f"{self.kind}s".upper()
        values = getattr(plugin.module, listed, ())
        if not isinstance(values, tuple | list):
            raise InputError(f"{plugin.path}: {listed} = {values!r:.80}: expected a tuple")
        for value in values:
            with user_code(f"{plugin.path}, {listed}"):
                self.take(value, plugin.origin, plugin.module)

    @contextlib.contextmanager
    def including(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Know more entries for a while: those of one call."""
        before = dict(self.data), dict(self.origins)
        try:
            for name, value in values.items():
                self.take(value, written_in(value), name=name)
            yield
        finally:
            self.data, self.origins = before


def written_in(value: Any) -> Origin | None:
    """Return the origin of the first class or function of a user in a thing, if it has a file."""
    algorithm = getattr(value, "algorithm", value)
    parts = [getattr(algorithm, side, None) for side in ("client", "server")]
    for kind in [type(part) for part in parts if part is not None] or [value]:
        home = str(getattr(kind, "__module__", ""))
        file = getattr(sys.modules.get(home), "__file__", None)
        if file is not None and home.partition(".")[0] != "fedzmg" and Path(file).is_file():
            return Origin.of(Path(file))
    return None


def _referred(name: object) -> tuple[Plugin, Any] | None:
    """Return the loaded plugin and the value that ``FILE.py:NAME`` names."""
    file, attribute = split_reference(name) or ("", "")
    plugin = _PLUGINS.get(file)
    if plugin is None or attribute not in vars(plugin.module):
        return None
    return plugin, vars(plugin.module)[attribute]


def _distribution(point: metadata.EntryPoint) -> str:
    return "" if point.dist is None else f"{point.dist.name} {point.dist.version}"
