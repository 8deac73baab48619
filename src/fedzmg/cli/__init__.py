"""The command line: every command is a thin layer over the library."""

import io
import re
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fedzmg.cli import data, deploying, extending, inspection, measuring, searching, training
from fedzmg.cli.common import INTERRUPTED, with_plugins
from fedzmg.errors import InputError, Interrupted, UserCodeError
from fedzmg.plain_text import plain
from fedzmg.plugins import PluginError
from fedzmg.terminal.render import print_text
from fedzmg.version import __version__

_LONGEST = 1000
_NO_MEMORY = re.compile("out of memory|(?:can't|cannot) allocate memory|not enough memory")
FIRST_STEPS = """\
fedzmg trains and compares federated-learning algorithms. Try:

  fedzmg compare              four algorithms on a small built-in task: table and figure
  fedzmg list                 all algorithms and tasks
  fedzmg run digits           train one algorithm
  fedzmg report runs/NAME     a page with tables and figures of what was trained

fedzmg --help shows all commands."""


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        meant = {"train": "run", "simulate": "run", "search": "grid", "plot": "report"}
        if args[0] in meant:
            raise InputError(f"no such command: {args[0]!r}. Did you mean {meant[args[0]]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Interrupted as error:  # typer would reduce it to an exit code
            _interrupted(f" after round {error.done} of {error.rounds}; nothing is lost,")


app = typer.Typer(
    cls=_Commands, help="Train, compare and deploy federated algorithms.",
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

for command in (  # in the order of the help
    training.compare, training.run, searching.tune, inspection.list_, searching.grid,
    training.study, training.validate, training.schema, inspection.watch, inspection.report,
    inspection.diff, inspection.verify, inspection.keep, inspection.restore, inspection.export,
    measuring.diagnose, measuring.theory, extending.check,
):  # fmt: skip
    results = inspection.watch, inspection.report, inspection.keep, inspection.restore
    if command not in (*results, measuring.theory):
        command = with_plugins(command)
    app.command(name=command.__name__.rstrip("_"))(command)
app.add_typer(data.app, name="data")
app.add_typer(deploying.app, name="deploy")
app.add_typer(extending.new, name="new")


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        print_text(f"fedzmg {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print_text(FIRST_STEPS)


def main() -> None:
    """Entry point: one line and exit code 2 for bad input, 130 for Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if app(standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
    except InputError as error:
        _fail(str(error), error.__cause__ if isinstance(error, UserCodeError) else None)
    except PluginError as error:
        print_text(plain(f"fedzmg: {error}"), err=True)
        traceback.print_exception(error.__cause__)
        sys.exit(1)
    except KeyboardInterrupt:
        _interrupted()
    except (OSError, UnicodeEncodeError) as error:
        if hasattr(error, "__notes__"):  # of a user's own model, loss or metric
            raise
        path, reason = (getattr(error, key, None) for key in ("filename", "strerror"))
        _fail(f"{path or 'the output'}: {reason or error}; check name, permissions and space")
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError; others are mistakes of this program.
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        places = "".join(f" ({place})" for place in getattr(error, "__notes__", ()))
        _fail(f"out of memory {error}{places}: use a smaller cohort or model, or a larger machine")
    except Exception as error:
        # Pydantic replaces Ctrl-C inside its serializer by an error of its own.
        if type(error).__name__ == "PydanticSerializationError" and "Interrupt" in str(error):
            _interrupted()
        # Usage errors, of click or of the copy that newer versions of typer carry along.
        if not hasattr(error, "format_message"):
            raise
        # click and typer both append the same suggestion.
        _fail(re.sub(r"(Did you mean [^?]*\?)(\s+\1)+", r"\1", error.format_message()))


def _interrupted(done: str = ";") -> NoReturn:
    print_text(f"\nfedzmg: interrupted{done} run the same command again to continue", err=True)
    sys.exit(INTERRUPTED)


def _fail(message: str, cause: BaseException | None = None) -> None:
    line = plain(" ".join(message.split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    if line:  # empty after the help that a bare command shows
        print_text(f"fedzmg: error: {line}", err=True)
    if cause is not None:
        traceback.print_exception(cause)
    sys.exit(2)
