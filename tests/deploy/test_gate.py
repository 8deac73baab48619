"""The gate alone, in front of a stub of the SuperLink."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fedzmg.deploy.gate import open_gate
from fedzmg.deploy.processes import free_port

pytest.importorskip("flwr")
MOST = 1 << 20
NODE = b"\x08\xac\x02"
"""Flower's message with the number 300."""


class SuperLink(BaseHTTPRequestHandler):
    """Knows the key ``right`` as node 300; remembers calls and their sizes."""

    calls: list[tuple[str, int]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.calls.append((self.path, len(body)))
        is_known = self.headers["flwr-signature"] == "valid" and self.headers["flwr-public-key"]
        is_own = not self.path.endswith("get-run") or body == b"\n\x03" + NODE
        content = NODE if self.path.endswith("activate-node") else b""
        self.send_response(200 if is_known and is_own else 401)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Port of a gate."""
    SuperLink.calls = []
    with HTTPServer(("127.0.0.1", 0), SuperLink) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        found = free_port()
        with open_gate(stub.server_port, "127.0.0.1", found, MOST, None, tmp_path / "cut"):
            yield found
        stub.shutdown()


def post(port: int, path: str, size: int = 0, signature: str = "valid") -> int:
    """Post raw bytes, as a client that follows no rule could; return the status."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\nConnection: close\r\n"
    head += f"flwr-public-key: right\r\nflwr-signature: {signature}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 10) as call:
        call.sendall(head.encode())
        block = bytes(1 << 16)
        try:
            for start in range(0, size, len(block)):
                call.sendall(block[: size - start])
        except ConnectionError:  # the gate has stopped reading
            pass
        return int(call.recv(100).split()[1])


def test_only_plain_calls_of_devices_pass(port: int) -> None:
    for path in ("../control/x", "%2e%2e/control/x", "..%2fcontrol/x", "a/b", "", "..", "/", "A"):
        assert post(port, f"/v1/fleet/{path}") == 404
    assert post(port, "/v1/control/register-node") == 404
    assert post(port, "/v1/fleet/pull-messages?more") == 200
    assert SuperLink.calls == [("/v1/fleet/pull-messages", 0)]


def test_device_that_sends_too_much_is_cut_off_and_named_but_not_by_a_stranger(
    port: int, tmp_path: Path
) -> None:
    assert post(port, "/v1/fleet/activate-node") == 200
    assert post(port, "/v1/fleet/push-object", MOST // 2) == 200
    assert post(port, "/v1/fleet/push-object", 4 * MOST, "forged") == 413
    assert not (tmp_path / "cut").exists()
    # What an answer has sent before counts, too.
    assert post(port, "/v1/fleet/push-object", MOST // 2 + 1) == 413
    assert (tmp_path / "cut").read_text() == "300\n"
    assert max(size for _, size in SuperLink.calls) == MOST // 2
