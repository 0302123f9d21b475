"""Leaving without losing a request: stop being ready, keep accepting while the news spreads, then finish what is here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum

from paceline_runtime.logs import log_event

__all__ = ["Drain", "DrainPhase"]


class DrainPhase(StrEnum):
    """Where a server is on its way out."""

    SERVING = "serving"
    ANNOUNCED = "announced"  # not ready any more, but endpoints still lead here: accept, and close connections
    CLOSED = "closed"  # nobody should come any more: refuse new work


class Drain:
    """Counts requests in flight and walks through the phases, once. Times are seconds.

    `on_closed` is called when no new work is taken any more.
    """

    def __init__(self, propagation: float, timeout: float, on_closed: Callable[[], None]) -> None:
        self._propagation = propagation
        self._timeout = timeout
        self._on_closed = on_closed
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.phase = DrainPhase.SERVING
        self.in_flight = 0
        self.timed_out = False

    def enter(self) -> None:
        """A request for work began."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request for work has been answered."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def begin(self) -> asyncio.Task[None]:
        """Start to drain (again: no effect); the task ends when nothing is in flight, or the time is over."""
        if self._task is None:
            self.phase = DrainPhase.ANNOUNCED
            log_event("drain_began", in_flight=self.in_flight, propagation=self._propagation, timeout=self._timeout)
            self._task = asyncio.ensure_future(self._walk())
        return self._task

    def close(self) -> None:
        """Refuse new work from now on."""
        self.phase = DrainPhase.CLOSED
        self._on_closed()

    async def _walk(self) -> None:
        await asyncio.sleep(self._propagation)
        self.close()
        try:
            await asyncio.wait_for(self._idle.wait(), self._timeout)
        except TimeoutError:
            self.timed_out = True
        log_event("drain_ended", in_flight=self.in_flight, timed_out=self.timed_out)

    async def wait_idle(self, seconds: float) -> None:
        """Return when nothing is in flight, or after `seconds`."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return
