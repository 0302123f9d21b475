"""A queue of keys: each waits at most once, has one worker at a time, and comes back if it was added meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["WorkQueue"]

K = TypeVar("K", bound=Hashable)
_FIRST_RETRY = 1.0  # seconds
_LONGEST_RETRY = 60.0  # seconds: an object that can't be applied is tried this often, no matter how long it lasts


class WorkQueue(Generic[K]):
    """Level-triggered work: a key says "look at this", never what happened, so that bursts collapse into one look.

    `waited` is told how many seconds each key waited for a worker. `clock` is monotonic seconds.
    """

    def __init__(
        self, waited: Callable[[float], object] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waited = waited
        self._clock = clock
        self._since: dict[K, float] = {}
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._waiting: set[K] = set()
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._due: dict[K, float] = {}  # when the last failure of each key is to be tried again, by the clock

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Ask for a look at `key` as soon as a worker is free."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._since[key] = self._clock()
            self._ready.put_nowait(key)

    def add_later(self, key: K, delay: float) -> None:
        """Ask for a look in `delay` seconds, unless one comes earlier; the earliest of several wins."""
        loop = asyncio.get_running_loop()
        known = self._timers.get(key)
        if known is not None and known.when() <= loop.time() + delay:
            return
        if known is not None:
            known.cancel()
        self._timers[key] = loop.call_later(delay, self.add, key)

    def retry(self, key: K) -> float:
        """Ask for a look after a delay that doubles with each failure in a row; return it in seconds.

        A look that came earlier, because something happened, doesn't count: while an earlier service's children go one by
        one, ten looks fail in a second, and the eleventh must not be a minute away.
        """
        if self._clock() >= self._due.get(key, 0.0):
            self._failures[key] = self._failures.get(key, 0) + 1
        failures = self._failures[key]
        # spread, so that services that failed together (an API server gone) don't come back together
        delay = min(_FIRST_RETRY * 2.0 ** (failures - 1), _LONGEST_RETRY) * random.uniform(0.8, 1.2)  # noqa: S311
        self._due[key] = self._clock() + delay
        self.add_later(key, delay)
        return delay

    def succeed(self, key: K) -> None:
        """Forget the failures of `key`."""
        self._failures.pop(key, None)
        self._due.pop(key, None)

    async def get(self) -> K:
        """Wait for a key; it stays reserved until `done`."""
        key = await self._ready.get()
        self._waiting.discard(key)
        self._active.add(key)
        self._waited(self._clock() - self._since.pop(key))
        return key

    def done(self, key: K) -> None:
        """Release `key`; if it was added while it was worked on, it is queued again."""
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        """Cancel what would come back later."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
