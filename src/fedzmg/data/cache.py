"""Data folder: locks, disk errors, hashes, progress, and downloads of files with a known SHA-256.

Downloaded bytes go to ``NAME.part``, which is renamed to ``NAME`` when its hash is right; an
interrupted download is resumed. A mirror replaces everything before the file's name:
``https://mirror/data`` or a local folder. Servers are not trusted: bytes and time are limited.
"""

import contextlib
import errno
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit

import platformdirs
from filelock import FileLock, Timeout

from fedzmg.errors import InputError
from fedzmg.storage.files import naming_errors
from fedzmg.storage.formats import file_sha256
from fedzmg.version import __version__

ENVIRONMENT = "FEDZMG_DATA"
UNDECLARED = 2**31  # most bytes of a file without a declared size
PAUSE = 1.0  # seconds before the first retry; doubled each time
TIMEOUT = 30.0  # seconds without a byte before an attempt fails
SLACK = 300.0  # seconds that a download may take, plus those of its bytes at the lowest rate
LOWEST_RATE = 2**14  # bytes per second
RETRIES = 3

_TRANSIENT = {408, 416, 425, 429, 500, 502, 503, 504}
# A certificate that cannot be verified is a ValueError, too.
_PERMANENT = (socket.gaierror, InvalidURL, FileNotFoundError, ValueError, OverflowError)
_REMEDY = "choose another source with --mirror, or use files you have with 'fedzmg data import'"
writing = partial(naming_errors, remedy=f"free space or set {ENVIRONMENT} to another folder")
"""Turn a system error while writing a path into one clear line."""


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
    """Hold a lock between processes; ``waiting`` is called once if another process holds it."""
    guard = FileLock(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = guard.acquire(timeout=0)
        except Timeout:
            waiting()
            held = guard.acquire()
        except NotImplementedError as error:  # a file system without locks
            raise OSError(errno.ENOLCK, str(error)) from None
    with held:
        yield


def size_of(path: Path) -> int:
    """Return the bytes of all files below a folder; 0 if there is none."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def download(
    url: str, to: Path, *, sha256: str, size: int | None = None, progress: Progress = SILENT,
    mirror: str | None = None,
) -> Path:  # fmt: skip
    """Download a file unless it is there already; ``mirror`` is an address or a folder instead."""
    if to.is_file() and file_sha256(to) == sha256:
        return to
    source = mirrored(url, mirror or os.environ.get("FEDZMG_MIRROR") or None)
    part = to.with_name(f"{to.name}.part")
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
    for restarted in (False, True):
        resumed = _fetch(source, part, size, progress)
        found = file_sha256(part)
        if found == sha256:
            with writing(to):
                return part.replace(to)
        part.unlink()
        if restarted or not resumed:
            break
        progress.say(f"{to.name}: the file has changed since the first part; starting again")
    raise InputError(f"{source}: SHA-256 is {found}, expected {sha256}: {_REMEDY}")


def mirrored(url: str, mirror: str | None) -> str:
    """Return the address to use instead of ``url``."""
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
        except InputError:
            raise
        # A redirect may name an address that cannot be parsed, or a port that does not exist.
        except (OSError, HTTPException, ValueError, OverflowError) as error:
            cause = getattr(error, "reason", None) or error
            reason = " ".join(str(getattr(cause, "strerror", None) or cause).split())[:200]
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


def _attempt(source: str, part: Path, size: int | None, report: Progress) -> None:
    """Request the missing bytes once."""
    first = done = part.stat().st_size if part.exists() else 0
    if done and done == size:
        return
    headers = {"User-Agent": f"fedzmg/{__version__}"}
    headers |= {"Range": f"bytes={done}-"} if done else {}
    request = urllib.request.Request(source, headers=headers)
    end = time.monotonic() + SLACK
    with urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT) as response:
        if response.status != 206:  # the server sends the whole file
            first = done = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink()
            raise OSError("the server sent another part than requested")
        length = response.headers.get("Content-Length", "")[:20]
        total = done + int(length) if length.isdecimal() else size
        most = size or UNDECLARED
        report.begin(part.stem, total)
        with writing(part):
            file = part.open("ab" if done else "wb")
        with file:
            report.advance(done)
            while max(done, total or 0) <= most and (chunk := response.read1(2**18)):
                done += len(chunk)
                if done <= most:
                    with writing(part):
                        file.write(chunk)
                        file.flush()
                    report.advance(done)
                if time.monotonic() > end + (done - first) / LOWEST_RATE:
                    slow = f"the server is slower than {LOWEST_RATE} bytes per second"
                    raise InputError(f"{source}: {slow}: try again later, {_REMEDY}")
    if max(done, total or 0) > most:
        part.unlink()
        raise InputError(f"{source}: sends more than {most} bytes: {_REMEDY}")
    if done < (total or 0):
        raise OSError(f"broke off after {done} of {total} bytes")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects to http and https only, and never from https back to http."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()  # the body of a redirect may have no end
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, req: Any, fp: Any, *rest: Any) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url).scheme, urlsplit(rest[-1]).scheme
        if after not in (before, "https"):
            raise InputError(f"{req.full_url} redirects to {rest[-1]}, which is not followed")
        return super().redirect_request(req, fp, *rest)
