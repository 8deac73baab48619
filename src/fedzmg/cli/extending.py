"""Commands for algorithms of one's own: ``fedzmg check`` and ``fedzmg new``."""

import json
import keyword
import re
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Typer

from fedzmg.cli import common
from fedzmg.cli.common import Json, opt
from fedzmg.errors import InputError, check_names, unknown
from fedzmg.terminal.render import print_text

new = Typer(help="Write a template for an algorithm of your own.", no_args_is_help=True)


def check(
    target: Annotated[
        str, Argument(metavar="FILE", help="A file with ALGORITHMS, or an algorithm's name.")
    ],
    algorithm: Annotated[str | None, opt("Only this algorithm of the file.", "all")] = None,
    as_json: Json = False,
) -> None:
    """Run conformance tests on algorithms: engines agree, resume, packing, bytes, bad data.

    Exit code 0 if all properties hold, 1 if not, 2 for an error.
    """
    from fedzmg import testing

    results = []
    for entry in load_algorithms(target, algorithm):
        results.append(testing.check(entry))
        if not as_json:
            print_text(str(results[-1]))
    if as_json:
        print_text(json.dumps({"algorithms": [result.as_dict() for result in results]}))
    if not all(result.ok for result in results):
        raise SystemExit(1)


def load_algorithms(target: str, name: str | None = None) -> list[Any]:
    """Return the algorithms of a file, or a built-in one."""
    from fedzmg import plugins
    from fedzmg.algorithms import ALGORITHMS
    from fedzmg.contract import Algorithm

    if target in ALGORITHMS and name is None:
        return [ALGORITHMS[target]]
    if not target.endswith(".py"):
        raise unknown("algorithm or file NAME.py", target, ALGORITHMS, "fedzmg list")
    try:
        listed = getattr(plugins.load(target).module, "ALGORITHMS", ())
    except plugins.PluginError as error:
        traceback.print_exception(error.__cause__)
        raise InputError(str(error)) from error
    if not listed:
        raise InputError(f"{target} defines no ALGORITHMS: add ALGORITHMS = (Algorithm(...),)")
    found = {getattr(entry, "algorithm", entry).name: entry for entry in listed}
    if name is not None:
        check_names(f"algorithm of {target}", [name], found)
    # The table adds descriptions; a plain Algorithm declares no traffic.
    full = {n: e if isinstance(e, Algorithm) else ALGORITHMS[n] for n, e in found.items()}
    return list(full.values()) if name is None else [full[name]]


@new.command(name="algorithm")
def new_algorithm(
    name: Annotated[str, Argument(help="Lower-case letters, digits and _, such as my_rule.")],
    out: Annotated[
        Path | None, opt("File to write; its test is written beside it.", "NAME.py")
    ] = None,
) -> None:
    """Write a file with a working algorithm, and its test; then change the equations."""
    from fedzmg import testing
    from fedzmg.algorithms import ALGORITHMS

    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise InputError(f"name = {name!r}: expected lower-case letters, digits and _")
    path = Path(f"{name}.py") if out is None else out
    module = path.stem
    if path.suffix != ".py" or not module.isidentifier() or keyword.iskeyword(module):
        raise InputError(f"--out {path}: expected a file NAME.py")
    if module in sys.stdlib_module_names or module in ("fedzmg", "numpy", "torch", "pytest"):
        raise InputError(f"{path} would hide the Python module {module}: choose another name")
    files = {path: "algorithm.txt", path.with_name(f"test_{path.name}"): "algorithm_test.txt"}
    for file in files:
        if file.exists():
            raise InputError(f"{file} exists: choose another name, or remove it")
    if name in ALGORITHMS:
        raise InputError(f"name = {name!r}: there is an algorithm of this name; choose another")
    words = "".join(word.capitalize() for word in name.split("_"))
    named = {"@NAME@": name, "@CLASS@": words, "@MODULE@": module}
    for file, template in files.items():
        text = Path(testing.__file__).with_name(template).read_text(encoding="utf-8")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:  # never over another file
            stream.write(re.sub("@[A-Z]+@", lambda found: named[found[0]], text))
        common.print_path("written", file)
    common.say(f"next: fedzmg check {path}, pytest {list(files)[1]}")
