"""The only door to a SuperLink: it lets devices' calls through and nothing else.

A SuperLink serves devices and its own administration at one address, without authentication of
the latter. It therefore listens on the loopback interface only, and this gate forwards the calls
of devices. It also bounds the bytes of an answer to a message, and names devices that send more.
"""

import asyncio
import contextlib
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fedzmg.errors import InputError

_OPEN = re.compile("/v1/fleet/[a-z-]+")  # devices' calls: one plain word, so no '..' or '%'
_NODE = "flwr-public-key"
_HOP = {"connection", "content-encoding", "content-length", "host", "transfer-encoding"}
"""Headers of one connection alone."""
_EMPTY = 16  # bytes of an answer to ``pull-messages`` up to which it holds no message
_IDLE_SECONDS = 75  # devices call more often: uvicorn leaks connections that it closes itself


@contextlib.contextmanager
def open_gate(
    inner: int, host: str, port: int, most: int, keys: Path | None, cut: Path
) -> Iterator[Counter[str]]:
    """Listen in a thread; yield the bytes of bodies from devices (``up``) and to them (``down``).

    ``inner`` is the port of the SuperLink on the loopback interface. ``keys`` has certificates;
    None: plain text. Nodes that answer a message with more than ``most`` bytes are appended to the
    file ``cut``. ``InputError``: the port is taken.
    """
    import httpx
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    counted, left, nodes = Counter[str](), dict[str, int](), dict[str, bytes]()
    verify = keys is not None and ssl.create_default_context(cafile=keys / "ca.crt")
    target = f"{'https' if keys else 'http'}://127.0.0.1:{inner}"
    client = httpx.AsyncClient(base_url=target, verify=verify, timeout=120, trust_env=False)

    async def name(node: bytes, headers: dict[str, str]) -> None:
        """Write the number of a node whose owner made a call; others can name its key, too."""
        own = bytes([10, len(node)]) + node  # a message for the SuperLink that holds the number
        asked = await client.post("/v1/fleet/get-run", content=own, headers=headers)
        if asked.status_code != 401:
            with cut.open("a") as file:
                file.write(f"{sum((b & 127) << 7 * i for i, b in enumerate(node[1:]))}\n")

    async def forward(request: Request) -> Response:
        path, key, body = request.url.path, request.headers.get(_NODE, ""), bytearray()
        if not _OPEN.fullmatch(path):
            return Response(status_code=404)
        headers = {n: v for n, v in request.headers.items() if n not in _HOP}
        try:
            async for part in request.stream():
                body += part
                if len(body) > left.get(key, most):
                    if node := nodes.get(key):
                        await name(node, headers)
                    return Response(status_code=413)
            answer = await client.post(path, content=bytes(body), headers=headers)
        except httpx.HTTPError:
            return Response(status_code=503)
        if path.endswith("/activate-node") and answer.is_success:
            nodes[key] = answer.content  # its number, as a varint after a tag
        elif path.endswith("/pull-messages") and answer.is_success and len(answer.content) > _EMPTY:
            left[key] = most
        elif "/push-" in path and answer.is_success:  # of a key that the SuperLink knows
            left[key] = left.get(key, most) - len(body)
        counted.update(up=len(body), down=len(answer.content))
        answer.stream = httpx.ByteStream(b"")  # else a reference cycle keeps both bodies for long
        kept = {n: v for n, v in answer.headers.items() if n not in _HOP}
        return Response(answer.content, answer.status_code, kept)

    config = uvicorn.Config(
        Route("/{path:path}", forward, methods=["POST"]), host, port, ws="none",
        log_level="critical", access_log=False, timeout_keep_alive=_IDLE_SECONDS,
        ssl_certfile=keys and str(keys / "server.pem"),
        ssl_keyfile=keys and str(keys / "server.key"),
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise InputError(f"port {port} of {host} cannot be used: choose another --port")
            time.sleep(0.1)
        yield counted
    finally:
        server.should_exit = True
        thread.join(timeout=5)
