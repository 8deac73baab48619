"""Data folder: locks, disk errors, hashes, progress, and downloads of files with a known SHA-256.

Downloaded bytes go to ``NAME.part``, which is renamed to ``NAME`` when its hash is right; an
interrupted download is resumed. A mirror replaces everything before the file's name:
``https://mirror/data`` or a local folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gaierror
from ssl import SSLCertVerificationError
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit

import platformdirs
from filelock import FileLock, Timeout

from fedzmg.errors import InputError
from fedzmg.version import __version__

ENVIRONMENT = "FEDZMG_DATA"
UNDECLARED = 2**31  # most bytes of a file without a declared size
PAUSE = 1.0  # seconds before the first retry; doubled each time
TIMEOUT = 30.0  # seconds without a byte before an attempt fails
RETRIES = 3

_TRANSIENT = {408, 416, 425, 429, 500, 502, 503, 504}
_PERMANENT = (gaierror, SSLCertVerificationError, http.client.InvalidURL, FileNotFoundError)
_REMEDY = "choose another source with --mirror, or use files you have with 'fedzmg data import'"
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class Progress(Protocol):
    """Receiver of progress updates."""

    def begin(self, what: str, total: int | None) -> None:
        """Start a piece of work of ``total`` bytes, where known."""

    def advance(self, done: int) -> None:
        """Report the bytes that are done."""

    def say(self, text: str) -> None:
        """Print a line."""


class Silent:
    """Progress that prints nothing."""

    begin = advance = say = staticmethod(lambda *_: None)


SILENT = Silent()


def root(given: Path | None = None) -> Path:
    """Return the data folder: the one given, else ``$FEDZMG_DATA``, else the user's cache."""
    default = platformdirs.user_cache_path("fedzmg", appauthor=False)
    return Path(given or os.environ.get(ENVIRONMENT) or default).expanduser().absolute()


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that only one process can have; it is freed when its process ends.

    ``waiting`` is called once if another process holds it.
    """
    guard = FileLock(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            guard.acquire(timeout=0)
        except Timeout:
            waiting()
            guard.acquire()
        except NotImplementedError as error:  # a file system without locks
            raise OSError(errno.ENOLCK, str(error)) from None
    try:
        yield
    finally:
        guard.release()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a system error while writing ``path`` into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by a parser, not by the system
            raise
        reason = "disk is full" if error.errno in _NO_ROOM else error.strerror
        raise InputError(
            f"cannot write {path}: {reason}; free space or set {ENVIRONMENT} to another folder"
        ) from None


def size_of(path: Path) -> int:
    """Return the bytes of all files below a folder; 0 if there is none."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def file_hash(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(
    url: str,
    to: Path,
    *,
    sha256: str,
    size: int | None = None,
    progress: Progress = SILENT,
    mirror: str | None = None,
) -> Path:
    """Download a file unless it is there already.

    ``mirror`` is an address or a folder to use instead; ``$FEDZMG_MIRROR`` by default.
    """
    if to.is_file() and file_hash(to) == sha256:
        return to
    source = mirrored(url, mirror or os.environ.get("FEDZMG_MIRROR") or None)
    part = to.with_name(f"{to.name}.part")
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
    while True:
        resumed = _fetch(source, part, size, progress)
        found = file_hash(part)
        if found == sha256:
            with writing(to):
                return part.replace(to)
        part.unlink()
        if not resumed:
            raise InputError(f"{source}: SHA-256 is {found}, expected {sha256}: {_REMEDY}")
        progress.say(f"{to.name}: the file has changed since the first part; starting again")


def mirrored(url: str, mirror: str | None) -> str:
    """Return the address to use instead of ``url``.

    >>> mirrored("https://example.org/a/b.gz", "http://localhost:8000/data/")
    'http://localhost:8000/data/b.gz'
    """
    if mirror is None:
        return url
    name = urlsplit(url).path.rpartition("/")[2]
    if "@" in urlsplit(mirror).netloc:  # messages and logs name the address
        raise InputError("the mirror's address holds a user name, which is not supported")
    if urlsplit(mirror).scheme in ("http", "https", "file"):
        return f"{mirror.rstrip('/')}/{name}"
    return (Path(mirror).expanduser().absolute() / unquote(name)).as_uri()


def _fetch(source: str, part: Path, size: int | None, progress: Progress) -> bool:
    """Attempt until the file is complete; return whether an attempt continued an earlier one."""
    resumed = False
    for attempt in range(RETRIES + 1):
        resumed = resumed or (part.exists() and part.stat().st_size > 0)
        try:
            _attempt(source, part, size, progress)
            return resumed
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", None) or error
            reason = " ".join(str(getattr(cause, "strerror", None) or cause).split())
            final = isinstance(cause, _PERMANENT)
            if isinstance(error, HTTPError):
                final = error.code not in _TRANSIENT
                reason = f"the server answers {error.code} {reason}"
                error.close()
                if error.code == 416:  # no bytes after the part: it belongs to another file
                    part.unlink(missing_ok=True)
        if final or attempt == RETRIES:
            break
        progress.say(f"{part.stem}: {reason}; trying again in {PAUSE * 2**attempt:g} s")
        time.sleep(PAUSE * 2**attempt)
    raise InputError(f"{source}: {reason} (attempt {attempt + 1}): try again later, {_REMEDY}")


def _attempt(source: str, part: Path, size: int | None, progress: Progress) -> None:
    """Request the missing bytes once."""
    done = part.stat().st_size if part.exists() else 0
    if done and done == size:
        return
    headers = {"User-Agent": f"fedzmg/{__version__}"}
    headers |= {"Range": f"bytes={done}-"} if done else {}
    request = urllib.request.Request(source, headers=headers)
    with urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT) as response:
        if response.status != 206:  # the server sends the whole file
            done = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink()
            raise OSError("the server sent another part than requested")
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else size
        progress.begin(part.stem, total)
        with writing(part):
            file = part.open("ab" if done else "wb")
        with file:
            progress.advance(done)
            while chunk := response.read1(2**18):
                done += len(chunk)
                if done > (size or UNDECLARED):
                    part.unlink()
                    raise InputError(f"{source}: sends more than {size or UNDECLARED} bytes")
                with writing(part):
                    file.write(chunk)
                    file.flush()
                progress.advance(done)
    if done < (total or 0):
        raise OSError(f"broke off after {done} of {total} bytes")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects to http and https only, and never from https back to http."""

    def redirect_request(self, req: Any, fp: Any, *rest: Any) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url).scheme, urlsplit(rest[-1]).scheme
        if after not in (before, "https"):
            fp.close()
            raise InputError(f"{req.full_url} redirects to {rest[-1]}, which is not followed")
        return super().redirect_request(req, fp, *rest)
