"""A small Hugging Face hub on loopback: the endpoints that a download uses, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


@dataclass
class Hub:
    """Serves `files` of one repository at one commit. A context manager; `endpoint` is its address.

    `cuts` says how often the connection is closed in the middle of a file, `statuses` what the next requests are
    answered with whose method, path or range holds a text, `corrupt` which files are sent with a flipped byte and how often.
    """

    files: dict[str, bytes]
    repository: str = "org/name"
    commit: str = "c" * 40
    branches: tuple[str, ...] = ("main", "v1")
    token: str | None = None
    gated: bool = False
    redirect: str | None = None
    cuts: Counter[str] = field(default_factory=Counter)
    corrupt: Counter[str] = field(default_factory=Counter)
    statuses: list[tuple[str, int]] = field(default_factory=list)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fetched(self) -> set[str]:
        """Return the names of the files whose content was asked for."""
        marker = f"/resolve/{self.commit}/"
        return {path.split(marker)[1] for method, path, _ in self.requests if method == "GET" and marker in path}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        hub.requests.append((self.command, path, self.headers.get("Range")))
        for index, (part, status) in enumerate(hub.statuses):
            if part in f"{self.command} {path} {self.headers.get('Range')}":
                del hub.statuses[index]
                return self._send(status, b"")
        authorized = hub.token is None or self.headers.get("Authorization") == f"Bearer {hub.token}"
        if f"/{hub.repository}" not in path or not authorized:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        if hub.gated and "/resolve/" in path:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/"):
            return self._info(path)
        _, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        if revision != hub.commit or name not in hub.files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(name)

    def _info(self, path: str) -> None:
        hub = self.hub
        revision = path.partition("/revision/")[2] or "main"
        if revision not in (*hub.branches, hub.commit):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        siblings = [_sibling(name, content) for name, content in hub.files.items()]
        document = {"id": hub.repository, "modelId": hub.repository, "sha": hub.commit, "siblings": siblings}
        return self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        if hub.redirect and self.command == "GET":
            return self._send(302, b"", {"Location": hub.redirect + self.path})
        etag = _sibling(name, content).get("lfs", {}).get("sha256") or _git_hash(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit, "X-Linked-Size": str(len(content))}
        if self.command == "GET" and hub.corrupt[name] > 0:
            hub.corrupt[name] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and hub.cuts[name] > 0:
            hub.cuts[name] -= 1
            return self._send_half(206 if start else 200, content[start:], headers)
        return self._send(206 if start else 200, content[start:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_half(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Promise all, send half, and hang up."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.close_connection = True


def _sibling(name: str, content: bytes) -> dict[str, object]:
    item: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": _git_hash(content)}
    if name.endswith(LFS_SUFFIXES):
        digest = hashlib.sha256(content).hexdigest()
        item["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
    return item


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
