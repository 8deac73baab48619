from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedzmg.data import cache
from fedzmg.errors import InputError
from fedzmg.version import __version__

CONTENT = np.random.default_rng(0).bytes(700_001)
OTHER = np.random.default_rng(1).bytes(700_001)
SHA256 = hashlib.sha256(CONTENT).hexdigest()

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        self.server.seen.append(dict(self.headers) | {"path": self.path})
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self)

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", length: int | None = None, **more: str) -> None:
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    @property
    def start(self) -> int:
        return int(self.headers.get("Range", "bytes=0-")[6:-1])


class Server(ThreadingHTTPServer):
    daemon_threads = True
    answers: list[Answer]
    seen: list[dict[str, str]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/files/data.bin"

    def handle_error(self, *_: Any) -> None:
        pass  # a client that leaves early is part of these tests


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(cache, "PAUSE", 0.01)
    monkeypatch.setattr(cache, "RETRIES", 2)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("FEDZMG_MIRROR", raising=False)
    with Server(("127.0.0.1", 0), Handler) as running:
        running.answers, running.seen = [whole], []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def whole(handler: Handler) -> None:
    """The file, or the part of it that is asked for."""
    serve(CONTENT, handler)


def serve(content: bytes, handler: Handler) -> None:
    start = handler.start
    if start >= len(content):
        handler.reply(416)
    elif start:
        described = f"bytes {start}-{len(content) - 1}/{len(content)}"
        handler.reply(206, content[start:], Content_Range=described)
    else:
        handler.reply(200, content)


def cut(handler: Handler, content: bytes = CONTENT, at: int = 300_000) -> None:
    """Break off in the middle of the body."""
    handler.reply(200, content[:at], length=len(content))
    handler.close_connection = True


def stall(handler: Handler) -> None:
    """Send some bytes, then nothing."""
    handler.reply(200, CONTENT[:1000], length=len(CONTENT))
    threading.Event().wait(0.4)
    handler.close_connection = True


def ignore_range(handler: Handler) -> None:
    handler.reply(200, CONTENT)


def status(code: int) -> Answer:
    return lambda handler: handler.reply(code, b"no")


def redirect(to: str) -> Answer:
    return lambda handler: handler.reply(302, Location=to)


class Recorder:
    def __init__(self) -> None:
        self.begun: list[tuple[str, int | None]] = []
        self.done: list[int] = []
        self.lines: list[str] = []

    def begin(self, what: str, total: int | None) -> None:
        self.begun.append((what, total))

    def advance(self, done: int) -> None:
        self.done.append(done)

    def say(self, text: str) -> None:
        self.lines.append(text)


def get(server: Server, to: Path, **options: Any) -> Path:
    return cache.download(
        server.url, to / "data.bin", **{"sha256": SHA256, "size": len(CONTENT), **options}
    )


def only(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_fetched_once_with_progress(server: Server, tmp_path: Path) -> None:
    progress = Recorder()
    path = get(server, tmp_path / "new", progress=progress)
    assert path.read_bytes() == CONTENT
    assert progress.begun == [("data.bin", len(CONTENT))]
    assert progress.done[0] == 0
    assert progress.done[-1] == len(CONTENT)
    assert progress.done == sorted(progress.done)
    assert server.seen[0]["User-Agent"] == f"fedzmg/{__version__}"
    assert set(server.seen[0]) == {"path", "Host", "User-Agent", "Accept-Encoding", "Connection"}
    get(server, tmp_path / "new")
    assert len(server.seen) == 1
    assert only(tmp_path / "new") == ["data.bin"]


def cut_part(handler: Handler) -> None:
    described = f"bytes {handler.start}-{len(CONTENT) - 1}/{len(CONTENT)}"
    rest = len(CONTENT) - handler.start
    handler.reply(206, CONTENT[handler.start : 500_000], rest, Content_Range=described)
    handler.close_connection = True


def shifted(handler: Handler) -> None:
    handler.reply(206, CONTENT[5:], Content_Range=f"bytes 5-700000/{len(CONTENT)}")


@pytest.mark.parametrize(
    ("answers", "starts"),
    [
        ([cut, cut_part, whole], [None, 300_000, 500_000]),
        ([cut, ignore_range], [None, 300_000]),
        ([cut, shifted, whole], [None, 300_000, None]),
        ([status(500), status(429), whole], [None, None, None]),
        ([redirect("/b"), cut, redirect("/b"), whole], [None, None, 300_000, 300_000]),
    ],
    ids=["cut twice", "range ignored", "another range", "busy", "redirected"],
)
def test_a_failed_attempt_is_continued(
    server: Server, tmp_path: Path, answers: list[Answer], starts: list[int | None]
) -> None:
    (tmp_path / "data.bin").write_bytes(OTHER)
    server.answers = list(answers)
    assert get(server, tmp_path).read_bytes() == CONTENT
    expected = [None if start is None else f"bytes={start}-" for start in starts]
    assert [request.get("Range") for request in server.seen] == expected


def test_another_run_continues_where_the_first_one_gave_up(server: Server, tmp_path: Path) -> None:
    server.answers = [cut, status(503)]
    with pytest.raises(InputError, match="503"):
        get(server, tmp_path)
    assert (tmp_path / "data.bin.part").stat().st_size == 300_000
    server.answers = [whole]
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.seen[-1]["Range"] == "bytes=300000-"
    assert only(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_file_that_changed_meanwhile_is_fetched_from_the_start(
    server: Server, tmp_path: Path, size: int | None
) -> None:
    server.answers = [lambda handler: cut(handler, OTHER), whole]
    progress = Recorder()
    assert get(server, tmp_path, size=size, progress=progress).read_bytes() == CONTENT
    assert "starting again" in progress.lines[-1]


def test_a_complete_part_is_checked_and_not_trusted(server: Server, tmp_path: Path) -> None:
    for kept in (CONTENT, OTHER, CONTENT + b"more"):
        (tmp_path / "data.bin.part").write_bytes(kept)
        assert get(server, tmp_path, size=None).read_bytes() == CONTENT
        (tmp_path / "data.bin").unlink()


def test_a_server_that_stalls_is_left_and_asked_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "TIMEOUT", 0.2)
    monkeypatch.setattr(cache, "RETRIES", 20)
    server.answers = [stall, whole]
    progress = Recorder()
    assert get(server, tmp_path, progress=progress).read_bytes() == CONTENT
    assert progress.lines
    assert server.seen[-1]["Range"] == "bytes=1000-"


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_wrong_bytes_are_never_used(server: Server, tmp_path: Path, size: int | None) -> None:
    server.answers = [lambda handler: serve(OTHER, handler)]
    found = hashlib.sha256(OTHER).hexdigest()
    with pytest.raises(InputError, match=f"data.bin: SHA-256 is {found}, expected {SHA256}"):
        get(server, tmp_path, size=size)
    assert only(tmp_path) == []


def test_a_missing_file_is_reported_at_once(server: Server, tmp_path: Path) -> None:
    server.answers = [status(404)]
    with pytest.raises(InputError, match=r"data.bin: .*404"):
        get(server, tmp_path)
    assert len(server.seen) == 1
    assert only(tmp_path) == []


@pytest.mark.parametrize(
    "to", ["/files/data.bin", "file:///etc/passwd", "ftp://127.0.0.1/data.bin"]
)
def test_redirects_to_nowhere_good_are_refused(server: Server, tmp_path: Path, to: str) -> None:
    server.answers = [redirect(to)]
    with pytest.raises(InputError, match=r"redirects to|302") as caught:
        get(server, tmp_path)
    assert "\n" not in str(caught.value)
    assert only(tmp_path) == []


@pytest.mark.parametrize(
    ("announced", "size", "limit"),
    [(True, len(CONTENT), "700001"), (False, len(CONTENT), "700001"), (False, None, "2000")],
)
def test_an_endless_file_does_not_fill_the_disk(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: bool,
    size: int | None, limit: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(cache, "UNDECLARED", 2000)
    sent = []

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        if announced:
            handler.send_header("Content-Length", str(10**12))
        handler.send_header("Connection", "close")
        handler.end_headers()
        for _ in range(10_000):
            handler.wfile.write(bytes(100_000))
            sent.append(100_000)

    server.answers = [endless]
    with pytest.raises(InputError, match=limit):
        get(server, tmp_path, size=size)
    assert only(tmp_path) == []
    assert sum(sent) < 50_000_000


def stream(first: bytes, repeated: bytes, pause: float = 0.0) -> Answer:
    """Send the first bytes, then the others without end."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 " + first)
        while not threading.Event().wait(pause):
            handler.wfile.write(repeated)
            handler.wfile.flush()

    return answer


OK = b"200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        stream(OK + b"\r\n", b"x", 0.01),
        stream(OK + CHUNKED, b"1\r\nx\r\n", 0.01),
        stream(b"302 Found\r\nLocation: /b\r\n\r\n", b"x", 0.01),
    ],
    ids=["body", "chunks", "redirect"],
)
def test_a_server_that_never_ends_is_left(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    """Every byte starts the socket's timeout again."""
    monkeypatch.setattr(cache, "SLACK", 0.1)
    server.answers = [answer]
    with pytest.raises(InputError, match=r"slower than 16384|302") as caught:
        get(server, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_server_that_always_changes_the_file_is_left(server: Server, tmp_path: Path) -> None:
    server.answers = [
        lambda handler: serve(OTHER, handler) if handler.start else cut(handler, OTHER)
    ]
    with pytest.raises(InputError, match="SHA-256 is"):
        get(server, tmp_path)
    assert len(server.seen) == 4


@pytest.mark.parametrize(
    "answer",
    [
        redirect("http://[x/"),
        redirect("http://127.0.0.1:99999999999/"),
        redirect(f"http://{'x' * 70}.example/"),
        redirect("http://a..b/"),
        lambda handler: handler.reply(404, length=int("9" * 4000)),
        stream(OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b"x" * 2000),
        stream(b"302 Found\r\nLocation: /b\r\n\r\n", b"x" * 2**20),
        stream(b"503 " + b"x" * 60_000 + b"\r\n\r\n", b"x"),
    ],
)
def test_a_nonsensical_answer_is_one_line(server: Server, tmp_path: Path, answer: Answer) -> None:
    server.answers = [answer]
    with pytest.raises(InputError) as caught:
        get(server, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert only(tmp_path) == []


def test_text_of_a_server_cannot_take_over_the_terminal(server: Server, fedzmg: Any) -> None:
    evil = b"[red]\x1b]0;t\x07\x1b[2J\x08\x9b31m\x85\x7f\rx"
    server.answers = [
        stream(b"503 " + evil + b"\r\n\r\n", b"x" * 2000),
        stream(b"302 Found\r\nLocation: ftp://" + evil + b"\r\n\r\n", b"x" * 2000),
        stream(b"404 " + evil + b"\r\n\r\n", b"x" * 2000),
    ]
    # The first answer is shown before another attempt, the others end the command.
    for shown in ("trying again", "404"):
        done = fedzmg("data", "get", "cifar100", "--mirror", server.url.rpartition("/")[0])
        assert done.code == 2
        assert shown in done.err
        assert "[red]" in done.err
        assert [c for c in done.out + done.err if c not in "\n\xa0" and not c.isprintable()] == []


def test_a_host_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "PAUSE", 0.0)
    monkeypatch.setenv("NO_PROXY", "*")

    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for url, match in {
        "http://127.0.0.1:1/a": r"refused .*attempt 4",
        "http://127.0.0.1:port/a": r"nonnumeric port.*attempt 1",
        "http://unknown.example/a": r"Name or service not known.*attempt 1",
    }.items():
        if "unknown" in url:
            monkeypatch.setattr(socket, "getaddrinfo", fail)
        with pytest.raises(InputError, match=match):
            cache.download(url, tmp_path / "a", sha256=SHA256)


def test_a_mirror_takes_the_place_of_the_host(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = "https://official.example/deep/data.bin"
    base = server.url.rpartition("/files/")[0] + "/copy/"
    cache.download(official, tmp_path / "a", sha256=SHA256, mirror=base)
    assert server.seen[-1]["path"] == "/copy/data.bin"
    monkeypatch.setenv("FEDZMG_MIRROR", base)
    cache.download(official, tmp_path / "b", sha256=SHA256)
    assert server.seen[-1]["path"] == "/copy/data.bin"
    assert (tmp_path / "b").read_bytes() == CONTENT


def test_a_mirror_may_be_a_folder(tmp_path: Path) -> None:
    official = "https://official.example/deep/data.bin"
    folder = tmp_path / "a mirror"
    folder.mkdir()
    (folder / "data.bin").write_bytes(CONTENT)
    for number, mirror in enumerate([str(folder), folder.as_uri()]):
        to = tmp_path / str(number)
        (tmp_path / f"{number}.part").write_bytes(b"the beginning of something else")
        cache.download(official, to, sha256=SHA256, size=len(CONTENT), mirror=mirror)
        assert to.read_bytes() == CONTENT
    (folder / "data.bin").write_bytes(OTHER)
    with pytest.raises(InputError, match="SHA-256 is"):
        cache.download(official, tmp_path / "c", sha256=SHA256, mirror=str(folder))
    (folder / "data.bin").unlink()
    with pytest.raises(InputError, match=r"a%20mirror/data.bin: No such file"):
        cache.download(official, tmp_path / "c", sha256=SHA256, mirror=str(folder))
