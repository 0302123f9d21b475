"""`paceline-runtime --fetch-only`: bring a model to this machine, say how far it is, check it, and end. No torch here.

Runs as a Job that fills a cache before any pod starts. How far it is stands at `GET /admin/progress` of the admin port.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from paceline_runtime.admin_auth import TokenFile
from paceline_runtime.hub_progress import Tally, tallied
from paceline_runtime.logs import log_event
from paceline_runtime.model_errors import ModelFormatError
from paceline_runtime.uri import resolve_model

__all__ = ["checksum_of", "fetch_only"]

_CHUNK = 1 << 20


def fetch_only(
    uri: str, revision: str | None, checksum: str | None, admin: tuple[str, int] | None, tokens: TokenFile | None
) -> int:
    """Fetch the model of `uri`, compare its `checksum` (None: say it), return the exit code 0.

    `admin` is the address that tells the progress. Raises `ModelError`, also for another checksum.
    """
    with ExitStack() as stack:
        tally = stack.enter_context(tallied())
        if admin is not None and tokens is not None:
            stack.enter_context(_told(admin, tally, tokens))
        path = resolve_model(uri, revision)
        found = checksum_of(path)
    log_event("model fetched", model=uri, path=str(path), checksum=found)
    if checksum is not None and found != checksum:
        raise ModelFormatError(f"model {uri!r} has the checksum {found}, not {checksum}")
    return 0


def checksum_of(path: Path) -> str:
    """Return `sha256:…` of a file; of a folder, that of its files' sums in `sha256sum`'s form, sorted by name."""
    if path.is_file():
        return f"sha256:{_sum(path)}"
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{_sum(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class _Progress(BaseHTTPRequestHandler):
    """Answers `GET /admin/progress` for those who have a token."""

    server: _ProgressServer

    def do_GET(self) -> None:
        if not self.server.tokens.accepts(self.headers.get("Authorization", "")):
            self.send_error(401)
            return
        if self.path != "/admin/progress":
            self.send_error(404)
            return
        done, total = self.server.tally.read()
        text = json.dumps({"done": done, "total": total}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Requests are no news."""


class _ProgressServer(ThreadingHTTPServer):
    """One small port beside a download."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], tally: Tally, tokens: TokenFile) -> None:
        super().__init__(address, _Progress)
        self.tally = tally
        self.tokens = tokens


@contextmanager
def _told(address: tuple[str, int], tally: Tally, tokens: TokenFile) -> Iterator[None]:
    with _ProgressServer(address, tally, tokens) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
