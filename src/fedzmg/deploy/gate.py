"""The only door to a SuperLink: it lets devices' calls through and nothing else.

A SuperLink serves devices and its own administration at one address, without authentication of
the latter. It therefore listens on the loopback interface only, and this gate forwards the calls
of devices. It also bounds the bytes that a device may send in answer to one message.
"""

import asyncio
import ssl
import threading
from collections import Counter
from pathlib import Path

OPEN = "/v1/fleet/"
"""Path of devices' calls."""
_NODE = "flwr-public-key"
_HOP = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "transfer-encoding",
    "content-encoding",
}
_MOST_KEYS = 10_000
_DELIVERED = 16
"""Bytes of an answer to ``pull-messages`` above which it holds a message."""


class Gate:
    """A proxy in a thread of its own.

    Args:
        target: address of the SuperLink, with its scheme.
        host: interface to listen on.
        port: port to listen on.
        most: bytes that a device may send in answer to a message.
        keys: directory with the certificates; None: plain text.
    """

    def __init__(self, target: str, host: str, port: int, most: int, keys: Path | None) -> None:
        import httpx
        import uvicorn
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route

        self.bytes = Counter[str]()
        """Bytes of bodies from devices (``up``) and to them (``down``)."""
        self.refused = 0
        """Requests that were too large or not of a device."""
        left: dict[str, int] = {}
        verify = keys is not None and ssl.create_default_context(cafile=keys / "ca.crt")
        client = httpx.AsyncClient(base_url=target, verify=verify, timeout=120, trust_env=False)

        async def forward(request: Request) -> Response:
            key = request.headers.get(_NODE, "")[:1000]
            if not request.url.path.startswith(OPEN) or len(left) > _MOST_KEYS:
                self.refused += 1
                left.clear()
                return Response(status_code=404)
            body = bytearray()
            async for part in request.stream():
                body += part
                left[key] = left.get(key, most) - len(part)
                if left[key] < 0:
                    self.refused += 1
                    return Response(status_code=413)
            headers = {n: v for n, v in request.headers.items() if n not in _HOP}
            try:
                answer = await client.post(request.url.path, content=bytes(body), headers=headers)
            except httpx.HTTPError:
                return Response(status_code=503)
            if request.url.path.endswith("pull-messages") and len(answer.content) > _DELIVERED:
                left[key] = most
            self.bytes.update(up=len(body), down=len(answer.content))
            kept = {n: v for n, v in answer.headers.items() if n not in _HOP}
            return Response(answer.content, answer.status_code, kept)

        routes = [Route("/{path:path}", forward, methods=["POST"])]
        config = uvicorn.Config(
            Starlette(routes=routes), host, port, log_level="error", access_log=False,
            ssl_certfile=keys and str(keys / "server.pem"),
            ssl_keyfile=keys and str(keys / "server.key"),
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve()), daemon=True
        )
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """True while the gate listens."""
        return self._server.started and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if the gate cannot listen, for example because the port is taken."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
