"""A mounted Secret that is read again when it changes; one that is gone or broken for a moment changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from paceline_runtime.logs import log_event
from paceline_runtime.settings import SettingsError

__all__ = ["SecretFile", "secret_lines"]

T = TypeVar("T")


class SecretFile(Generic[T]):
    """What `parse` makes of the file at `path`; `what` names it in the log. Raises `SettingsError` at start."""

    def __init__(self, path: Path, what: str, parse: Callable[[Path], T]) -> None:
        self._path = path
        self._what = what
        self._parse = parse
        self._stamp = self._look()
        self._value = parse(path)

    def value(self) -> T:
        """Return what the file holds now; costs a `stat` while it is unchanged."""
        stamp = self._look()
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp  # also of a broken one: it is told once, not with every request
            try:
                self._value = self._parse(self._path)
                log_event(f"{self._what}_reloaded")
            except SettingsError as error:
                log_event(f"{self._what}_kept", reason=str(error))
        return self._value

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116  # follows a ConfigMap's or Secret's symbolic link, as intended
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def secret_lines(path: Path, what: str) -> list[bytes]:
    """Return the lines of a secret that aren't empty. Raises `SettingsError` if it can't be read or holds none."""
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise SettingsError(f"can't read the {what} file {path}: {error.strerror or error}") from None
    if not lines:
        raise SettingsError(f"the {what} file {path} holds no {what.rsplit(maxsplit=1)[-1]}: write one per line")
    return lines
