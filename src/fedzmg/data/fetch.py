"""Download a file whose SHA-256 is known: resumed where it broke off, never used if it is wrong.

Bytes go to ``NAME.part`` and are moved to ``NAME`` when their hash is right. A mirror takes the
place of everything before the file's name: ``https://mirror/data`` or a folder of this machine.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from fedzmg.data.cache import writing
from fedzmg.errors import InputError
from fedzmg.storage.files import sync_directory
from fedzmg.version import __version__

ENVIRONMENT = "FEDZMG_MIRROR"
MARGIN = 2**20
"""How far a file may exceed its declared size before it is cut off."""
UNDECLARED = 2**31
"""The most that is taken of a file whose size nobody declared."""
PAUSE = 1.0
"""Seconds before the first retry; doubled each time."""

_CHUNK = 2**18
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class Progress(Protocol):
    """Somebody who wants to know how far the work is."""

    def begin(self, what: str, total: int | None) -> None:
        """A piece of work starts; ``total`` bytes where that is known."""

    def advance(self, done: int) -> None:
        """So many bytes of it are done."""

    def say(self, text: str) -> None:
        """A line of its own."""


class Silent:
    """Nobody wants to know."""

    def begin(self, what: str, total: int | None) -> None:
        """Say nothing."""

    def advance(self, done: int) -> None:
        """Say nothing."""

    def say(self, text: str) -> None:
        """Say nothing."""


SILENT = Silent()


class _Broken(Exception):
    """An attempt failed in a way that the next one may not."""


def download(
    url: str,
    to: Path,
    *,
    sha256: str,
    size: int | None = None,
    progress: Progress = SILENT,
    timeout: float = 30.0,
    retries: int = 3,
    mirror: str | None = None,
) -> Path:
    """Fetch a file, or find it fetched already.

    Args:
        url: the official address, http or https.
        to: where the file goes.
        sha256: what its contents must hash to.
        size: its length in bytes, where known.
        progress: told how far it is.
        timeout: seconds without a byte after which an attempt is given up.
        retries: attempts after the first.
        mirror: address or folder to take the file from instead; ``$FEDZMG_MIRROR`` by default.

    Raises:
        InputError: if the file cannot be had, or is not the one it should be.
    """
    if to.is_file() and file_hash(to) == sha256:
        return to
    source = mirrored(url, mirror or os.environ.get(ENVIRONMENT) or None)
    part = to.with_name(f"{to.name}.part")
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
    job = _Job(source, part, size, progress, timeout)
    resumed = job.copy(source) if isinstance(source, Path) else _persist(job, retries)
    found = file_hash(part)
    if found != sha256 and resumed:
        # What was there before may be the beginning of another version of the file.
        progress.say(f"{to.name}: the rest does not fit what was there; starting again")
        part.unlink()
        _persist(job, retries)
        found = file_hash(part)
    if found != sha256:
        part.unlink()
        raise InputError(
            f"{source}: SHA-256 is {found}, expected {sha256}; the file was not used: try again "
            "later or choose another source with --mirror"
        )
    with writing(to):
        part.replace(to)
        sync_directory(to.parent)
    return to


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mirrored(url: str, mirror: str | None) -> str | Path:
    """The address, or the file of this machine, to take instead of ``url``.

    >>> mirrored("https://example.org/a/b.gz", "http://localhost:8000/data/")
    'http://localhost:8000/data/b.gz'
    """
    if mirror is None:
        return url
    name = urlsplit(url).path.rpartition("/")[2]
    parts = urlsplit(mirror)
    if parts.scheme in ("http", "https"):
        if "@" in parts.netloc:
            raise InputError("the mirror's address holds a user name, which is not supported")
        return f"{mirror.rstrip('/')}/{name}"
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)) / unquote(name)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", mirror):
        raise InputError(f"mirror {mirror!r}: expected http, https, file or a folder")
    return Path(mirror).expanduser() / unquote(name)


def _persist(job: _Job, retries: int) -> bool:
    """Attempt until the file is there; whether any attempt continued an earlier one."""
    resumed = False
    for attempt in range(retries + 1):
        try:
            return job.attempt() or resumed
        except _Broken as error:
            if attempt == retries:
                raise InputError(
                    f"{job.source}: {error}, given up after {attempt + 1} attempts: run the same "
                    "command again to go on, choose another source with --mirror, or give files "
                    "you have with 'fedzmg data import'"
                ) from None
            resumed = job.have > 0
            wait = PAUSE * 2**attempt
            job.progress.say(f"{job.part.stem}: {error}; trying again in {wait:g} s")
            time.sleep(wait)
    raise AssertionError("unreachable")


class _Job:
    """One file on its way."""

    def __init__(
        self,
        source: str | Path,
        part: Path,
        size: int | None,
        progress: Progress,
        timeout: float,
    ) -> None:
        self.source, self.part, self.size = source, part, size
        self.progress, self.timeout = progress, timeout
        self.limit = UNDECLARED if size is None else size + MARGIN

    @property
    def have(self) -> int:
        """Bytes that are there already."""
        return self.part.stat().st_size if self.part.exists() else 0

    def copy(self, source: Path) -> bool:
        """Take the file from a folder of this machine."""
        try:
            with source.open("rb") as file:
                self._keep(iter(lambda: file.read(_CHUNK), b""), 0, source.stat().st_size)
        except InputError:
            raise
        except OSError as error:
            raise InputError(
                f"cannot read {source}: {error.strerror or error}; choose another --mirror"
            ) from None
        return False

    def attempt(self) -> bool:
        """Fetch what is missing; whether something was there before."""
        start = self.have
        if self.size is not None and start > self.size:
            self.part.unlink()
            start = 0
        if self.size is not None and start == self.size:
            return start > 0
        headers = {"User-Agent": f"fedzmg/{__version__}"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            response = _opener().open(
                urllib.request.Request(str(self.source), headers=headers), timeout=self.timeout
            )
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and start:  # nothing after what is there: the hash will tell
                return True
            raise self._refused(error) from None
        except InputError:  # a redirect that is not followed
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        with response:
            start = self._start(response, start)
            length = _whole(response.headers.get("Content-Length"))
            total = self.size if length is None else start + length
            if total is not None and total > self.limit:
                raise self._too_long(total)
            self._keep(self._chunks(response), start, total)
        if total is not None and self.have < total:
            raise _Broken(f"broke off after {self.have} of {total} bytes")
        return start > 0

    def _start(self, response: Any, start: int) -> int:
        """Where the body begins: a server may send the whole file although a part was asked."""
        if response.status != 206:
            return 0
        described = response.headers.get("Content-Range", "")
        found = re.match(r"bytes (\d+)-\d+/(\d+|\*)", described)
        if found and int(found[1]) == start:
            return start
        self.part.unlink(missing_ok=True)
        raise _Broken(f"sent another part than was asked for ({described!r})")

    def _chunks(self, response: Any) -> Iterator[bytes]:
        while True:
            try:
                chunk = response.read1(_CHUNK)
            except TimeoutError:
                raise _Broken(f"sent nothing for {self.timeout:g} s") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _Broken(f"broke off ({_reason(error)})") from None
            if not chunk:
                return
            yield chunk

    def _keep(self, chunks: Iterator[bytes], start: int, total: int | None) -> None:
        done = start
        self.progress.begin(self.part.stem, total)
        self.progress.advance(done)
        with writing(self.part):
            file = self.part.open("ab" if start else "wb", buffering=0)
        with file:
            for chunk in chunks:
                done += len(chunk)
                if done > self.limit:
                    file.close()
                    raise self._too_long(done)
                with writing(self.part, max(0, (total or 0) - done)):
                    _write_all(file.write, chunk)
                self.progress.advance(done)
            with writing(self.part):
                os.fsync(file.fileno())

    def _too_long(self, found: int) -> InputError:
        self.part.unlink(missing_ok=True)
        return InputError(
            f"{self.source}: sends {found} bytes or more, expected at most {self.limit}; nothing "
            "was kept: choose another source with --mirror"
        )

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        if error.code in _PASSING:
            return _Broken(f"the server answers {error.code} {error.reason}")
        where = "" if error.url == self.source else f" at {error.url}"
        reason = " ".join(str(error.reason).split())
        if 300 <= error.code < 400:
            reason = "redirects in a circle" if "infinite loop" in reason else reason
            return InputError(f"{self.source}: {reason}{where}: choose another --mirror")
        return InputError(
            f"{self.source}: the server answers {error.code} {reason}{where}: choose another "
            "source with --mirror or give files you have with 'fedzmg data import'"
        )

    def _unreachable(self, error: Exception) -> Exception:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return _Broken(f"no answer for {self.timeout:g} s")
        if isinstance(cause, ssl.SSLCertVerificationError):
            return InputError(
                f"{self.source}: its certificate is not trusted ({cause.verify_message}): choose "
                "another source with --mirror"
            )
        if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
            return InputError(
                f"{self.source}: the host is not known ({_reason(cause)}): check the network, "
                "choose another source with --mirror, or give files you have with 'fedzmg data "
                "import'"
            )
        if isinstance(cause, ValueError | http.client.InvalidURL):
            return InputError(f"{self.source}: not an address that can be used ({cause})")
        return _Broken(f"cannot be reached ({_reason(cause)})")


def _write_all(write: Callable[[memoryview], int | None], chunk: bytes) -> None:
    """A write to a nearly full disk may take only a part, and says so when it takes none."""
    left = memoryview(chunk)
    while left:
        left = left[write(left) or 0 :]


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _reason(error: object) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to http and https only, and never from https back to http."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("http", "https") or (before == "https" and after != "https"):
            fp.close()
            raise InputError(
                f"{req.full_url} redirects to {newurl}, which is not followed: choose another "
                "source with --mirror"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """An opener that knows http and https and nothing else."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    opener.addheaders = []
    return opener
