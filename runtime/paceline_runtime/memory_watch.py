"""Watches the memory of both processes against the container's limit: new work is turned away before the kernel kills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil

from paceline_runtime.logs import log_event
from paceline_runtime.metrics import RuntimeMetrics

__all__ = ["MemoryWatch"]

_SECONDS = 2.0
# of the limit; between the two nothing changes, so that a server at the edge doesn't open and close with every request
_CLOSE, _OPEN = 0.95, 0.90


class MemoryWatch:
    """Publishes resident memory and tells `set_low` when it is nearly all there is. `limit` is in bytes; None: no limit."""

    def __init__(self, metrics: RuntimeMetrics, limit: int | None, set_low: Callable[[bool], None]) -> None:
        self._metrics = metrics
        self._limit = limit
        self._set_low = set_low
        self._low = False
        if limit is not None:
            metrics.gauge("memory_limit").set(limit)

    async def run(self, engine_pid: Callable[[], int | None]) -> None:
        """Look every few seconds until cancelled; `engine_pid` names the engine process of the moment."""
        while True:
            self.look(_resident(None), _resident(pid) if (pid := engine_pid()) is not None else 0)
            await asyncio.sleep(_SECONDS)

    def look(self, api: int, engine: int) -> None:
        """Take the resident bytes of both processes."""
        self._metrics.gauge("memory", "api").set(api)
        self._metrics.gauge("memory", "engine").set(engine)
        if self._limit is None:
            return
        share = (api + engine) / self._limit
        low = share > (_OPEN if self._low else _CLOSE)
        if low != self._low:
            self._low = low
            log_event("low_memory" if low else "memory_recovered", used=api + engine, limit=self._limit)
            self._set_low(low)


def _resident(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # it has just ended
