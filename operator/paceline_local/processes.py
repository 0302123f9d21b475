"""Processes of containers: start them in a session of their own, recognise them after a restart, end all of them.

A process is known by pid *and* start time, so that a reused pid is never signalled. What left its session is found by a
variable in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline_local.waiting import set_within

__all__ = ["Process", "ProcessId", "end", "identify", "kill_all", "marked", "start"]


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that can't be mistaken for a later one with the same pid. `started` is in clock ticks since boot."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs (a zombie doesn't)."""
        stat = _stat(self.pid)
        return stat is not None and stat == (self.started, True)


def _stat(pid: int) -> tuple[int, bool] | None:
    """Return (start time in ticks, running) of a pid, None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return int(fields[19]), fields[0] not in "ZX"


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process, None if there is none with this pid."""
    stat = _stat(pid)
    return ProcessId(pid, stat[0]) if stat else None


class Process:
    """A process of a container: one that we started, or one that an earlier agent did.

    The exit code of the latter goes to nobody, so it stays unknown. A plain Popen is used because asyncio's own kills its
    process when the event loop closes, and an agent that crashes must leave its pods running.
    """

    def __init__(self, identity: ProcessId, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.id = identity
        self._popen = popen

    async def wait(self) -> int | None:
        """Wait for the end and return the exit code: negative for a signal, None if it is unknown."""
        await _ended(self.id)
        return self._popen.wait() if self._popen else None


async def _ended(process: ProcessId) -> None:
    """Wait until a process has ended, woken by its pidfd."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        while process.alive:
            # the pid may have been reused just before pidfd_open: then nothing would ever wake us
            await set_within(ended, 5.0)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def start(command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Process:
    """Start a command in its own session, output appended to `log`. Raises OSError if it can't be started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        popen = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return Process(identify(popen.pid) or ProcessId(popen.pid, -1), popen)


def marked(variable: str, value: str | None = None) -> list[tuple[ProcessId, dict[str, str]]]:
    """Return the running processes whose environment has `variable` (with that value), and their environments.

    Ourselves and our parents are left out: a stack must not end who asks for its end.
    """
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for pid in set(psutil.pids()) - mine:
        environment = _environment(pid)
        matching = variable in environment and (value is None or environment[variable] == value)
        identity = identify(pid) if matching else None
        if identity is not None and identity.alive:
            found.append((identity, environment))
    return found


def _environment(pid: int) -> dict[str, str]:
    """Return what a process was started with; nothing for a process of somebody else, or one that has ended."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def kill_all(processes: Iterable[ProcessId], sign: signal.Signals) -> None:
    """Send a signal to each process that still runs."""
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, sign)


async def end(process: Process, grace: float) -> int | None:
    """Ask the process to stop, kill it after `grace` seconds, and return its exit code (None if unknown)."""
    if process.id.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.id.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(grace):
            return await process.wait()
    except TimeoutError:
        kill_all([process.id], signal.SIGKILL)
        return await process.wait()
