"""A small HTTP server that pods of the stack tests run: it answers who it is, and drains when it is told to stop."""

from __future__ import annotations

import http.server
import os
import pathlib
import signal
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every path; /sick makes the liveness probe fail from then on, /config shows a mounted file."""

    sick = False

    def do_GET(self) -> None:
        if self.path == "/sick":
            Handler.sick = True
        status = 500 if self.path == "/live" and Handler.sick else 200
        text = f"{os.environ['VERSION']} {os.environ['POD_NAME']} {os.getpid()}"
        if self.path == "/config":
            text = pathlib.Path(os.environ["CONFIG"], "greeting").read_text()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Serve on the pod's address until SIGTERM, then a little longer: endpoints need a moment to forget a pod."""
    server = http.server.ThreadingHTTPServer((os.environ["PACELINE_HOST"], 8000), Handler)
    server.daemon_threads = False

    def drain() -> None:
        time.sleep(0.5)
        server.shutdown()

    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain).start())
    print("serving", os.environ["VERSION"], flush=True)
    server.serve_forever(poll_interval=0.05)
    server.server_close()


if __name__ == "__main__":
    main()
