"""How far a download is: a bar on a terminal, a log line now and then everywhere else. No torch here."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from paceline_runtime.logs import log_event

__all__ = ["DownloadProgress", "LogProgress", "Tally", "progress_for", "tallied"]

_LOG_SECONDS = 10.0


class DownloadProgress(Protocol):
    """Is told of every piece, from several threads. A context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are here (fewer, if negative: a server began a file anew)."""


class Tally:
    """What all downloads of a `tallied` block have fetched and will fetch, in bytes; read from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = self._total = 0

    def add(self, *, done: int = 0, total: int = 0) -> None:
        """Count bytes that have come, and bytes that will."""
        with self._lock:
            self._done += done
            self._total += total

    def read(self) -> tuple[int, int]:
        """Return bytes fetched, bytes in all."""
        with self._lock:
            return self._done, self._total


_TALLY: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def tallied() -> Iterator[Tally]:
    """Count what is downloaded in this block."""
    tally = Tally()
    token = _TALLY.set(tally)
    try:
        yield tally
    finally:
        _TALLY.reset(token)


def progress_for(model: str, total: int) -> DownloadProgress:
    """Return what suits where standard error leads; it also counts into the tally of a `tallied` block."""
    shown: DownloadProgress = _Bar(model, total) if sys.stderr.isatty() else LogProgress(model, total)
    tally = _TALLY.get()
    return shown if tally is None else _Counted(shown, tally, total)


class _Counted:
    """Shows a download, and counts it."""

    def __init__(self, shown: DownloadProgress, tally: Tally, total: int) -> None:
        self._shown = shown
        self._tally = tally
        tally.add(total=total)

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._shown.__exit__(*exc)

    def advance(self, num_bytes: int) -> None:
        self._tally.add(done=num_bytes)
        self._shown.advance(num_bytes)


class LogProgress:
    """A log line every ten seconds, and one at the end."""

    def __init__(self, model: str, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._total = total
        self._now = now
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._said = now()

    def __enter__(self) -> Self:
        log_event("downloading", model=self._model, bytes=self._total)
        return self

    def __exit__(self, *exc: object) -> None:
        self._say("downloaded" if exc[0] is None else "download stopped")

    def advance(self, num_bytes: int) -> None:
        """Count, and say so if the time has come."""
        with self._lock:
            self._done += num_bytes
            due = self._now() - self._said >= _LOG_SECONDS
            if due:
                self._said = self._now()
        if due:
            self._say("downloading")

    def _say(self, event: str) -> None:
        seconds = max(self._now() - self._began, 1e-9)
        share: dict[str, Any] = {"percent": round(100 * self._done / self._total, 1)} if self._total else {}
        log_event(event, model=self._model, done=self._done, bytes=self._total, **share, rate=self._done / seconds)


class _Bar:
    def __init__(self, model: str, total: int) -> None:
        columns = (TextColumn(model), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("download", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        self._bar.advance(self._task, num_bytes)
