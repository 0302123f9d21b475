"""API keys of the public port: who asks, how urgent their work is, and whose tokens are counted.

The file is a mounted Secret with one key per line, read again when it changes, so that an old and a new key may overlap:

    # NAME KEY [tier=interactive|batch] [priority=N]
    web sk-5fa1…
    nightly sk-90bc… tier=batch

Names, never keys, appear in metrics, records and logs. A name may stand on several lines.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline_runtime.admin_auth import bearer
from paceline_runtime.api_errors import ApiError, error_body
from paceline_runtime.secret_file import SecretFile, secret_lines
from paceline_runtime.settings import SettingsError
from paceline_runtime.tiers import TIERS

__all__ = ["ApiKey", "KeyFile", "KeyGate", "api_key_of"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # a label's value
_MAX_KEYS = 1000  # each is compared with every request, and has time series of its own
_OPEN_PATHS = ("/health/", "/metrics", "/version")  # probes and scrapers have no key; nothing there is secret


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who asks: `priority` is the best (lowest) that their requests may have, and what they get if they don't ask."""

    name: str
    priority: int = 0

    @property
    def salt(self) -> int:
        """Keeps the cached blocks of this name apart: else response times would tell what others have asked."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=7).digest(), "big")


class KeyFile:
    """The keys of a file. Raises `SettingsError` at start for one that can't be used."""

    def __init__(self, path: Path) -> None:
        self._file = SecretFile(path, "api_keys", _read)

    def find(self, key: bytes) -> ApiKey | None:
        """Return whose key it is, in a time that tells nothing about the keys."""
        digest = hashlib.sha256(key).digest()
        found = None
        for known, owner in self._file.value():
            if hmac.compare_digest(known, digest):
                found = owner
        return found


class KeyGate:
    """Lets nothing but probes and metrics through without a key, and says in the scope whose it is."""

    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and not scope["path"].startswith(_OPEN_PATHS):
            key = bearer(Headers(scope=scope).get("authorization", ""))
            owner = None if key is None else self._keys.find(key)
            if owner is None:
                text = "give a key: 'Authorization: Bearer KEY'" if key is None else "Incorrect API key provided"
                error = ApiError(401, text, code="invalid_api_key")
                await JSONResponse(error_body(error), 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope.setdefault("state", {})["api_key"] = owner
        await self._app(scope, receive, send)


def api_key_of(scope: Scope) -> ApiKey | None:
    """Return whose key a request came with; None where no keys are asked for."""
    owner: ApiKey | None = scope.get("state", {}).get("api_key")
    return owner


def _read(path: Path) -> tuple[tuple[bytes, ApiKey], ...]:
    lines = [line for line in secret_lines(path, "API key") if not line.startswith(b"#")]
    if not 0 < len(lines) <= _MAX_KEYS:
        raise SettingsError(f"the API key file {path} holds {len(lines)} keys: write 1 to {_MAX_KEYS}, one per line")
    return tuple(_parse(line, f"{path}, key {number}") for number, line in enumerate(lines, start=1))


def _parse(line: bytes, where: str) -> tuple[bytes, ApiKey]:
    """Read one line. Errors name the place, not the line: it is a secret."""
    parts = line.split()
    name = parts[0].decode("ascii", errors="replace")
    if len(parts) < 2 or not _NAME.fullmatch(name):
        raise SettingsError(f"{where}: write 'NAME KEY', the name in letters, digits, '.', '_' and '-'")
    return hashlib.sha256(parts[1]).digest(), ApiKey(name, _priority(parts[2:], where))


def _priority(options: list[bytes], where: str) -> int:
    priority = 0
    for option in options:
        kind, _, value = option.decode("ascii", errors="replace").partition("=")
        if kind == "tier" and value in TIERS:
            priority = TIERS[value]
        elif kind == "priority" and re.fullmatch(r"-?\d{1,9}", value):
            priority = int(value)
        else:
            raise SettingsError(f"{where}: after the key may come 'tier=interactive', 'tier=batch' or 'priority=N'")
    return priority
