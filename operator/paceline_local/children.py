"""A process that must keep running: started, watched, started again with back-off, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from paceline_local.backoff import BackOff
from paceline_local.container_record import tail, trim_log
from paceline_local.processes import Process, end, start
from paceline_local.waiting import set_within

__all__ = ["Child", "ChildSpec", "ChildStatus", "Health", "last_line"]

log = logging.getLogger(__name__)
_POLL_S = 0.1
# quicker than containers': these are ours, and the fleet waits for them
_BACK_OFF = BackOff(first=0.5, limit=10.0, forgive_after=30.0)


class Health(StrEnum):
    """What a child does at the moment."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # it ended, and is started again after the back-off
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process of the stack. `ready` says whether it does its work; `grace` is how long it may take to stop."""

    name: str
    command: tuple[str, ...]
    ready: Callable[[], Awaitable[bool]]
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 10.0


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """What `paceline local status` shows of a child."""

    health: Health = Health.STARTING
    pid: int | None = None
    restarts: int = 0
    message: str = ""


class Child:
    """Keeps one process running until `stop`."""

    def __init__(self, spec: ChildSpec, env: Mapping[str, str], log_path: Path, changed: Callable[[], None]) -> None:
        self.spec, self._env, self._log, self._changed = spec, env, log_path, changed
        self.status = ChildStatus()
        self.ready = asyncio.Event()
        self._process: Process | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start keeping the process running."""
        self._task = asyncio.create_task(self._run(), name=self.spec.name)

    async def stop(self) -> None:
        """Stop the process and wait until it has ended."""
        self._stop.set()
        if self._process is not None:
            await end(self._process, self.spec.grace)
        if self._task is not None:
            await self._task
        self._set(health=Health.STOPPED, pid=None)

    def trim_log(self) -> None:
        """Keep the log bounded."""
        trim_log(self._log)

    async def _run(self) -> None:
        back_off = _BACK_OFF
        while not self._stop.is_set():
            began = time.monotonic()
            code = await self._once()
            if self._stop.is_set():
                return
            back_off = back_off.ended(time.monotonic() - began)
            message = f"{_ending(code)}: {last_line(self._log)}"
            log.warning("%s %s; next start in %g s", self.spec.name, message, back_off.delay)
            self._set(health=Health.WAITING, pid=None, restarts=self.status.restarts + 1, message=message)
            await set_within(self._stop, max(back_off.delay, _POLL_S))

    async def _once(self) -> int | None:
        """Run the process once to its end."""
        self.ready.clear()
        try:
            self._process = start(self.spec.command, dict(self._env) | dict(self.spec.env), self._log.parent, self._log)
        except OSError as error:
            with self._log.open("a") as file:
                file.write(f"error: {self.spec.command[0]} can't be started: {error.strerror}\n")
            return 127
        self._set(health=Health.STARTING, pid=self._process.id.pid)
        readiness = asyncio.create_task(self._await_ready())
        try:
            return await self._process.wait()
        finally:
            self._process = None
            readiness.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await readiness

    async def _await_ready(self) -> None:
        while True:
            if await self.spec.ready():
                break
            await asyncio.sleep(_POLL_S)
        self.ready.set()
        self._set(health=Health.READY, message="")

    def _set(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]  # checked by the dataclass's fields
        self._changed()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def last_line(path: Path) -> str:
    """Return the last line of a log that says something, preferably an error."""
    lines = [line for line in tail(path).splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1].strip()
