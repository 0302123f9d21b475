"""Bearer tokens of the admin port: from a file that may hold an old and a new one, read again when it changes."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from paceline_runtime.logs import log_event
from paceline_runtime.settings import SettingsError

__all__ = ["TokenFile"]


class TokenFile:
    """One token per line. Raises `SettingsError` at start if the file can't be read or is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        self._tokens = _read(path)

    @property
    def newest(self) -> bytes:
        """The first token: the one that is kept when the others go."""
        return self._tokens[0]

    def accepts(self, authorization: str) -> bool:
        """Return whether an `Authorization` header carries one of the tokens, in a time that tells nothing about them."""
        self._reload()
        kind, _, given = authorization.partition(" ")
        candidate = given.strip().encode("utf-8", errors="replace")
        matches = [hmac.compare_digest(candidate, token) for token in self._tokens]
        return kind.lower() == "bearer" and any(matches)

    def _reload(self) -> None:
        """Take a changed file over; a file that is gone or empty for a moment (a mount that is replaced) changes nothing."""
        stamp = self._look()
        if stamp == self._stamp or stamp is None:
            return
        try:
            self._tokens = _read(self._path)
            self._stamp = stamp
            log_event("admin_tokens_reloaded", tokens=len(self._tokens))
        except SettingsError as error:
            log_event("admin_tokens_kept", reason=str(error))

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116  # follows a ConfigMap's or Secret's symbolic link, as intended
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        tokens = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise SettingsError(f"can't read the admin token file {path}: {error.strerror or error}") from None
    if not tokens:
        raise SettingsError(f"the admin token file {path} holds no token: write one per line")
    return tokens
