"""Options, results and messages of commands."""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import RenderableType
from typer import Option

from fedzmg import plugins
from fedzmg.errors import InputError
from fedzmg.report.writing import check_place, refuse_foreign
from fedzmg.terminal.render import Terminal, print_line, print_text

INTERRUPTED = 130
UNFINISHED = 75  # exit code after the time limit: run the same command again
DEVICES = "auto, cpu or cuda."
ENGINES = "auto (measured), sequential, vectorized, compiled, cuda_graph or compiled_cuda_graph."


def opt(help: str, shown: str | bool = True, **more: Any) -> Any:
    """Declare an option; ``shown`` describes a default that depends on something else."""
    return Option(help=help, show_default=shown, **more)


def flag(name: str, help: str) -> Any:
    """Declare an option without a value."""
    return Option(name, help=help)


def setting(help: str, metavar: str = "KEY=VALUE", name: str = "--set") -> Any:
    """Declare an option that can be given several times."""
    return Option(name, metavar=metavar, help=help)


Texts = list[str] | None
Json = Annotated[bool, flag("--json", "Print JSON for a program to read.")]
Device = Annotated[str, opt(DEVICES)]
Cache = Annotated[
    Path | None, opt("Data folder.", "$FEDZMG_DATA or the user's cache", metavar="DIR")
]
Plugins = Annotated[
    Texts, setting("A file with algorithms, tasks, aggregators of your own.", "FILE.py", "--plugin")
]


def with_plugins(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option ``--plugin``, which loads files before anything else."""

    @functools.wraps(command)
    def loading(*args: Any, plugin: Texts = None, **given: Any) -> Any:
        for file in plugin or ():
            plugins.load(file)
        return command(*args, **given)

    signature = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    option = inspect.Parameter("plugin", kind, default=None, annotation=Plugins)
    parameters = [*signature.parameters.values(), option]
    loading.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return loading


def show(
    data: Mapping[str, Any], view: Callable[[int], RenderableType], as_json: bool,
    directory: Path | None = None, **paths: Path | str,
) -> None:  # fmt: skip
    """Print data as JSON, or a view of it as wide as the terminal and the paths of its files."""
    if as_json:
        own = {} if directory is None else {"directory": str(directory)}
        print_text(json.dumps({**data, **own}))
        return
    console = Terminal()
    console.print(view(console.width))
    for what, path in paths.items():
        print_path(what, path)


@contextlib.contextmanager
def mistakes_in(file: Path | str, settings: Iterable[str] | None) -> Iterator[None]:
    """Add the file and its ``--set`` options to errors."""
    try:
        yield
    except InputError as error:
        given = "".join(f" --set {text}" for text in settings or [])
        raise InputError(f"{file}{given}: {error}") from None


def say(*lines: str) -> None:
    """Print lines for the user on standard error."""
    for line in lines:
        print_line(f"fedzmg: {line}", err=True)


def print_path(what: str, path: Path | str, *, err: bool = False) -> None:
    """Print the path of something in one line."""
    print_line(f"{what:<7} {path}", err=err)


def check_output(path: Path, files: Iterable[str] = (), writer: str = "") -> None:
    """Check before long work that a directory of ``files``, or a single file, can be written."""
    if not files and path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory; choose a file with --out")
    check_place(path if files else path.parent)
    refuse_foreign(path, files, writer)
