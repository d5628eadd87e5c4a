"""The HTTP port: metrics, a status page, probes. A thread of its own, imported only when it is on.

It is the standard library's WSGI server: its few requests a minute need no second event loop, no dependency
and no fast parser, and a slow peer holds a thread of this server, never the daemon's loop. What a request
shows is made in the loop, in one step, so that it is whole; a loop that does not answer is a failed probe.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import hashlib
import importlib.resources
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from engram_client.errors import MetricsUnavailable
from engram_client.protocol import State
from engram_server.metrics import Metrics, Snapshot

log = logging.getLogger(__name__)

LOOP_ANSWERS_S = 5.0
PEER_PATIENCE_S = 10.0
"""How long a peer may take over its request."""
MAX_PEERS = 16

Answer = tuple[str, str, bytes]
"""HTTP status, content type, body."""


class StatusServer:
    """Serves `listen` (host:port) until `close`. `snapshot` is called in `loop`.

    Raises MetricsUnavailable.
    """

    def __init__(self, listen: str, loop: asyncio.AbstractEventLoop, snapshot: Callable[[], Snapshot]) -> None:
        self._loop = loop
        self._snapshot = snapshot
        self._metrics = Metrics()
        self._page = importlib.resources.files("engram_server").joinpath("page.html").read_bytes()
        self._policy = _policy(self._page.decode())
        host, port = address_of(listen)
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise MetricsUnavailable(listen=listen, problem=error.strerror or str(error)) from error
        self._server.set_app(self._serve)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        log.info("metrics and status page: http://%s", self.address)

    def __repr__(self) -> str:
        return f"<StatusServer {self.address}>"

    @property
    def address(self) -> str:
        """host:port as it was bound, in brackets where it is IPv6."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        """Waits for the accepting thread, 0.2 s at most; requests in progress end by themselves."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "/")
        if method not in ("GET", "HEAD"):
            status, kind, body = "405 Method Not Allowed", "text/plain", b"GET or HEAD\n"
        elif path not in ROUTES:
            status, kind, body = "404 Not Found", "text/plain", (" ".join(ROUTES) + "\n").encode()
        else:
            try:
                status, kind, body = ROUTES[path](self)
            except concurrent.futures.TimeoutError:
                status, kind, body = "503 Service Unavailable", "text/plain", b"the daemon does not answer\n"
            except Exception:  # a bug of ours costs one request
                log.exception("answering %s failed", path)
                status, kind, body = "500 Internal Server Error", "text/plain", b"see the daemon's log\n"
        headers = [
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", self._policy),
        ]
        start(status, headers)
        return [b"" if method == "HEAD" else body]

    def _ask(self) -> Snapshot:
        """The snapshot, made in the loop. Raises TimeoutError."""
        answer: concurrent.futures.Future[Snapshot] = concurrent.futures.Future()

        def make() -> None:
            try:
                answer.set_result(self._snapshot())
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(make)
        except RuntimeError as error:  # the loop has ended
            raise concurrent.futures.TimeoutError from error
        return answer.result(LOOP_ANSWERS_S)

    def _send_page(self) -> Answer:
        return "200 OK", "text/html; charset=utf-8", self._page

    def _send_status(self) -> Answer:
        now = self._ask()
        facts = {"status": now.status, "lookups": now.lookups, "refused": now.refused, "verified": now.verified}
        return "200 OK", "application/json", json.dumps(msgspec.to_builtins(facts)).encode()

    def _send_metrics(self) -> Answer:
        return "200 OK", CONTENT_TYPE_LATEST, self._metrics.text(self._ask())

    def _send_alive(self) -> Answer:
        """Answers while the loop does, whatever the state: a load takes minutes and is no reason to restart."""
        return "200 OK", "text/plain", f"{self._ask().status.state}\n".encode()

    def _send_ready(self) -> Answer:
        state = self._ask().status.state
        status = "200 OK" if state is State.READY else "503 Service Unavailable"
        return status, "text/plain", f"{state}\n".encode()


ROUTES: dict[str, Callable[[StatusServer], Answer]] = {
    "/": StatusServer._send_page,
    "/status.json": StatusServer._send_status,
    "/metrics": StatusServer._send_metrics,
    "/livez": StatusServer._send_alive,
    "/readyz": StatusServer._send_ready,
}


def address_of(listen: str) -> tuple[str, int]:
    """host and port of a checked metrics.listen; a port alone means loopback."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


def _policy(page: str) -> str:
    """Only the page's own script and style run, and it speaks with this server only."""
    hashes = {
        kind: base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()
        for kind in ("script", "style")
        if (match := re.search(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL))
    }
    sources = "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in hashes.items())
    return f"default-src 'none'; connect-src 'self'; {sources}; frame-ancestors 'none'"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_PEERS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """As WSGIServer's, which would ask the name service for our own name and may wait for it."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a peer of the HTTP port went away", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = PEER_PATIENCE_S
    server_version = "engram"
    sys_version = ""

    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: %s", self.address_string(), format % args)
