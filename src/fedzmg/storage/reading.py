"""Bounded reading of results of a stranger: plain files and directories, no links."""

import contextlib
import errno
import gzip
import io
import itertools
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from fedzmg.errors import InputError

MIB = 2**20
LIMIT = 512 * MIB  # largest size of a file in bytes, of a log also after decompression
MOST_ROUNDS = 1_000_000  # largest number of a round or trial
MOST_PLANNED = MOST_ROUNDS // 2  # of rounds in a plan, and of lines that its log would have
SKIPPED = ("tracking",)  # directories of other programs, which may hold links


def walk(top: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield directories of results like :func:`os.walk`, sorted; refuse links and devices."""

    def fail(error: OSError) -> None:
        if not top.is_dir():
            remedy = "give a run, a study, a grid or a directory of some"
            raise InputError(f"{top} is not a directory; {remedy}") from None
        if not isinstance(error, FileNotFoundError):  # removed meanwhile
            raise InputError(f"cannot read {error.filename}: {error.strerror}; check it") from None

    for place, folders, files in os.walk(top, onerror=fail):
        path = Path(place)
        for names in (folders, files):
            names[:] = sorted(n for n in names if not n.startswith(".") and n not in SKIPPED)
        for inner in (path / name for name in (*folders, *files)):
            is_link = inner.is_symlink()
            if is_link or (inner.exists() and not inner.is_dir() and not inner.is_file()):
                raise _refused(inner, is_link=is_link)
        yield path, folders, files


def check_folder(top: Path) -> None:
    """Refuse a folder of results with links, pipes or devices, if it exists."""
    for _ in walk(top) if top.is_dir() else ():
        pass


def files_below(top: Path, name: str) -> list[Path]:
    """Return the files of a name below a folder of results, in order."""
    return sorted(path / name for path, _, files in walk(top) if name in files)


@contextlib.contextmanager
def _opened(path: Path, *, typed: bool = False) -> Iterator[BinaryIO]:
    # Without blocking, opening a pipe does not wait for its writer.
    flags = 0 if typed else getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, is_link=True) from None
        raise
    with open(handle, "rb") as file:
        state = os.fstat(handle)
        if not typed and not stat.S_ISREG(state.st_mode):
            raise _refused(path, is_link=False)
        if state.st_size > LIMIT:
            raise _too_large(path)
        yield file


def check_file(path: Path) -> None:
    """Refuse a link, a pipe, a device or a file that is larger than the limit."""
    with _opened(path):
        pass


def read_file(path: Path, *, typed: bool = False) -> bytes:
    """Read a regular file of bounded size; a path that a user ``typed`` may be a link or a pipe."""
    with _opened(path, typed=typed) as file:
        return file.read()


def read_gzip(path: Path) -> bytes:
    """Read and decompress a file; damage raises ``OSError``, ``EOFError`` or ``zlib.error``."""
    with gzip.GzipFile(fileobj=io.BytesIO(read_file(path))) as file:
        pieces = iter(lambda: file.read(MIB), b"")
        content = b"".join(itertools.islice(pieces, LIMIT // MIB + 1))
    if len(content) > LIMIT:
        raise _too_large(path)
    return content


def strict_json(text: bytes | str) -> Any:
    """Parse JSON without ``NaN`` and ``Infinity``, which are not JSON; ``ValueError`` otherwise."""
    return json.loads(text, parse_constant=_not_json)


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def parse_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse lines of a log, a table each; ``ValueError`` otherwise."""
    found: list[dict[str, Any]] = strict_json(b"[" + b",".join(lines) + b"]")
    if len(found) != len(lines):
        raise ValueError("not a line of a log")
    numbers = [line.get(key, 0) for line in found for key in ("round", "trial")]
    if numbers and not 0 <= min(numbers) <= max(numbers) <= MOST_ROUNDS:
        raise ValueError("a round or trial out of range")
    return found


def _refused(path: Path, *, is_link: bool) -> InputError:
    what = "is a link" if is_link else "is not a regular file"
    return InputError(f"{path} {what}: results hold plain files and directories; remove it")


def _too_large(path: Path) -> InputError:
    return InputError(f"{path} is larger than {LIMIT // MIB} MiB, the limit: restore or remove it")
