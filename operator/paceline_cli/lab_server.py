"""The Lab's web server: the page, scenarios, and a pod's timeline, on loopback only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline_core.errors import PacelineError
from paceline_lab.assets import CONTENT_SECURITY_POLICY, PAGE, asset, live_document
from paceline_lab.presets import PRESETS
from paceline_lab.scenario import Scenario
from paceline_lab.scene import scene_of

__all__ = ["LabServer", "Pod"]

_BODY_LIMIT = 64 * 1024  # bytes; a scenario of 120 requests has 2 KiB
_POD_TIMEOUT_S = 5.0
_POD_LIMIT = 16 * 1024 * 1024  # bytes of an answer
_PREFIX = "/lab/"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's admin port, `url` as in `http://10.0.0.7:9000`, and the file with its token, read anew at each use."""

    url: str
    token_file: Path | None

    def get(self, path: str, since: int) -> bytes:
        """Return the answer of `GET /admin/PATH?since=…`. Raises `OSError` (an `HTTPError` for a refusal), `ValueError` for
        a token that fits no header."""
        headers = {}
        if self.token_file is not None:  # while a token is rotated its file has two: the pod takes either
            token = self.token_file.read_text().split(maxsplit=1)[:1]
            headers["Authorization"] = f"Bearer {''.join(token)}"
        request = urllib.request.Request(f"{self.url}/admin/{path}?since={since}", headers=headers)  # noqa: S310  # checked
        with urllib.request.urlopen(request, timeout=_POD_TIMEOUT_S) as answer:  # noqa: S310
            body: bytes = answer.read(_POD_LIMIT)
        return body


class LabServer(ThreadingHTTPServer):
    """Serves the Lab on loopback. Raises `OSError` if the port is taken."""

    daemon_threads = True

    def __init__(self, port: int, pod: Pod | None) -> None:
        self.pod = pod
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}{_PREFIX}"


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: LabServer
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # seconds that a silent connection may stay

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, make: Callable[[], None]) -> None:
        try:
            self._check_host()
            make()
        except _Refused as refused:
            self._send_json({"error": str(refused)}, refused.status)
        except PacelineError as error:
            self._send_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _check_host(self) -> None:
        """Refuse what comes under another name: a page from elsewhere whose name was pointed at this address."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if host not in ("127.0.0.1", "localhost", "::1"):
            raise _Refused(HTTPStatus.FORBIDDEN, "the Lab answers only on 127.0.0.1 and localhost")

    def _get(self) -> None:
        parts = urlsplit(self.path)
        if parts.path in ("/", "/lab"):
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", _PREFIX)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        name = parts.path.removeprefix(_PREFIX)
        if name == "api/presets":
            self._send_json(PRESETS)
        elif name == "api/live":
            url = "" if self.server.pod is None else self.server.pod.url
            self._send_json(live_document(url, needs_token=False, prefix="api", scenarios=True))
        elif name in ("api/timeline", "api/observe"):
            self._forward(name.removeprefix("api/"), parts.query)
        elif (found := asset(name or PAGE)) is not None and parts.path.startswith(_PREFIX):
            self._send(*found)
        else:
            raise _Refused(HTTPStatus.NOT_FOUND, f"no such page: the Lab is at {_PREFIX}")

    def _post(self) -> None:
        if urlsplit(self.path).path != f"{_PREFIX}api/run":
            raise _Refused(HTTPStatus.NOT_FOUND, f"POST goes to {_PREFIX}api/run")
        self._send_json(scene_of(Scenario.from_document(self._body())))

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _BODY_LIMIT:
            self.close_connection = True  # what wasn't read would be taken for the next request
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a scenario has a length of at most {_BODY_LIMIT} bytes")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _Refused(HTTPStatus.BAD_REQUEST, "the scenario is no JSON") from None

    def _pod(self) -> Pod:
        if self.server.pod is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "no pod to watch: start the Lab with --live URL")
        return self.server.pod

    def _forward(self, path: str, query: str) -> None:
        since = parse_qs(query).get("since", ["0"])[0]
        if not (since.isascii() and since.isdigit()):
            raise _Refused(HTTPStatus.BAD_REQUEST, "since is a whole number")
        try:
            body = self._pod().get(path, int(since))
        except urllib.error.HTTPError as error:
            raise _Refused(HTTPStatus(error.code), f"the pod answered {error.code}") from None
        except OSError as error:
            raise _Refused(HTTPStatus.BAD_GATEWAY, f"the pod can't be asked: {error}") from None
        except ValueError:  # whose words hold the token
            raise _Refused(HTTPStatus.BAD_GATEWAY, "the pod can't be asked: the token file holds no token") from None
        self._send(body, "application/json")

    def _send_json(self, document: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(document).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Keep quiet: the terminal shows the address, not each file of the page."""
