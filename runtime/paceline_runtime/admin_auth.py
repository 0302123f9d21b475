"""Bearer tokens of the admin port: from a file that may hold an old and a new one, read again when it changes."""

from __future__ import annotations

import hmac
from pathlib import Path

from paceline_runtime.secret_file import SecretFile, secret_lines

__all__ = ["TokenFile", "bearer"]


class TokenFile:
    """One token per line. Raises `SettingsError` at start if the file can't be read or is empty."""

    def __init__(self, path: Path) -> None:
        self._file = SecretFile(path, "admin_tokens", lambda p: tuple(secret_lines(p, "admin token")))

    @property
    def newest(self) -> bytes:
        """The first token: the one that is kept when the others go."""
        return self._file.value()[0]

    def accepts(self, authorization: str) -> bool:
        """Return whether an `Authorization` header carries one of the tokens, in a time that tells nothing about them."""
        candidate = bearer(authorization)
        matches = [hmac.compare_digest(candidate or b"", token) for token in self._file.value()]
        return candidate is not None and any(matches)


def bearer(authorization: str) -> bytes | None:
    """Return the token of an `Authorization: Bearer TOKEN` header, or None."""
    kind, _, given = authorization.partition(" ")
    return given.strip().encode("utf-8", errors="replace") if kind.lower() == "bearer" else None
