"""Safe writing of output files: nothing that another program or person wrote is replaced.

Every command that fills a directory lists its files in ``written.json``. The next
report in the same directory replaces and removes the files of the previous one; other commands
replace their own files and remove none.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fedzmg.errors import InputError
from fedzmg.storage.files import naming_errors, write_atomic
from fedzmg.storage.formats import read_json

LIST = "written.json"
ELSEWHERE = "choose another place with --out"
REPORT = "report"


def check_place(directory: Path) -> None:
    """Raise InputError if a directory, which need not exist yet, cannot be written."""
    with naming_errors(directory, ELSEWHERE):
        whole = directory.absolute()
        existing = next(path for path in (whole, *whole.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()


def write(path: Path, content: bytes, remedy: str = ELSEWHERE) -> None:
    """Write a file and the directories above it; raise InputError if that is impossible."""
    with naming_errors(path, remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)


def refuse_foreign(out: Path, names: Iterable[str], writer: str = REPORT) -> None:
    """Raise InputError if a file in ``out`` exists that the command ``writer`` did not write."""
    own = _lists(out, writer)[writer]
    for path in map(Path, names):
        # A link counts as a file, even a broken one, and leads to files of others.
        links = [folder for folder in path.parents[:-1] if (out / folder).is_symlink()]
        if links or (path.as_posix() not in own and os.path.lexists(out / path)):
            raise _foreign(out / (links or [path])[0], writer)


@contextlib.contextmanager
def staged(out: Path, writer: str) -> Iterator[Path]:
    """Yield a temporary directory whose files then replace those of the same names in ``out``."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    _write_all(out, files, writer)


def replace_files(out: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write a report and remove files of earlier ones only; return their names."""
    before = _write_all(out, files, REPORT)
    removed = [name for name in before if name not in files and _remove(out, name)]
    _write_list(out, files, REPORT)
    return removed


def _write_all(out: Path, files: Mapping[str, bytes], writer: str) -> list[str]:
    """Write and list files; return those that ``writer`` had listed before."""
    refuse_foreign(out, files, writer)
    before = _lists(out, writer)[writer]
    if files:  # the list comes first: an interrupted command must leave it for the next one
        _write_list(out, {*before, *files}, writer)
    for name, content in files.items():
        write(out / name, content)
    return before


def _lists(out: Path, writer: str) -> dict[str, list[str]]:
    """Read the listed files by the command that wrote them."""
    found = read_json(out / LIST) if os.path.lexists(out / LIST) else {}
    for names in found.values():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _foreign(out / LIST, writer)
    return {writer: [], **found}


def _write_list(out: Path, files: Iterable[str], writer: str) -> None:
    lists = {**_lists(out, writer), writer: sorted(files)}
    write(out / LIST, (json.dumps(lists, indent=1) + "\n").encode())


def _remove(out: Path, name: str) -> bool:
    """Remove a file inside ``out``, and folders that this leaves empty."""
    own = out.resolve()
    path = own / name
    # Links and ".." in a list lead to files of others.
    inside = path.resolve() == path and path.is_relative_to(own)
    if not inside or not path.is_file():
        return False
    path.unlink()
    with contextlib.suppress(OSError):  # it is not empty
        for folder in path.relative_to(own).parents[:-1]:
            (own / folder).rmdir()
    return True


def _foreign(path: Path, writer: str) -> InputError:
    who = "report" if writer == REPORT else f"'fedzmg {writer}'"
    remedy = f"move it away, or {ELSEWHERE}"
    return InputError(f"no {who} wrote {path}, and one would replace it: {remedy}")
