"""`/healthz`, `/readyz` and `/metrics` of the operator, served from a thread, so that a stuck event loop can't hide."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["Health", "serve"]

Check = Callable[[], str]
_STILL = 30.0  # seconds without a beat after which a loop counts as stuck: a relist of 1,000 services takes far less


class Health:
    """Why the process isn't alive or ready, from checks that return "" or the reason. Checks run on the server's threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: dict[str, Check] = {}
        self._beats: dict[str, float] = {}

    def beat(self, loop: str) -> None:
        """Note that `loop` goes round; from its first beat on it has to go on beating."""
        self._beats[loop] = self._clock()

    def end(self, loop: str) -> None:
        """Note that `loop` has ended as it should."""
        self._beats.pop(loop, None)

    def ready_if(self, name: str, check: Check) -> None:
        """Be ready only while `check` returns ""."""
        self._ready[name] = check

    def complaints(self) -> list[str]:
        """Return why the process should be started anew."""
        now = self._clock()
        return [f"{loop}: stuck for {now - at:.0f} s" for loop, at in list(self._beats.items()) if now - at > _STILL]

    def hindrances(self) -> list[str]:
        """Return why the process isn't ready."""
        return self.complaints() + [f"{name}: {why}" for name, check in list(self._ready.items()) if (why := check())]


def serve(host: str, port: int, health: Health, registry: CollectorRegistry) -> ThreadingHTTPServer:
    """Serve on a daemon thread; return the server, whose `server_port` is the one taken for port 0. Raises `OSError`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif self.path in ("/healthz", "/readyz"):
                why = health.complaints() if self.path == "/healthz" else health.hindrances()
                self._answer(503 if why else 200, "text/plain; charset=utf-8", ("\n".join(why or ["ok"]) + "\n").encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"here are /healthz, /readyz and /metrics\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name; probes are no news
            return

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
