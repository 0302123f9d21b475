"""The lock that makes a stack's supervisor unique, and the end of everything that a killed one left running."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator

from paceline_local.errors import LocalError
from paceline_local.processes import ProcessId, kill_all, marked
from paceline_local.state import MARKER, StateDir

__all__ = ["is_up", "lock_stack", "remove_home", "remove_leftovers"]

_GRACE_S = 5.0
_POLL_S = 0.05


@contextlib.contextmanager
def lock_stack(state: StateDir, *, patience: float = 0.0, held: int | None = None) -> Iterator[int]:
    """Hold the stack's lock and yield its descriptor. Raises `LocalError` if another supervisor has it. The kernel drops it
    with the last process that has the descriptor.

    With `patience` (seconds) who has it only for a moment, to see whether a stack is up, isn't taken for a supervisor.
    `held` is the descriptor of a lock that the parent process took for us.
    """
    descriptor = held if held is not None else _locked(state, time.monotonic() + patience)
    os.set_inheritable(descriptor, False)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(state: StateDir, deadline: float) -> int:
    """Return the descriptor of the locked file; the lock counts only if the file is still the one that others find."""
    while True:
        descriptor = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise LocalError(f"a stack is already up in {state.home}") from error
            time.sleep(_POLL_S)
            continue
        with contextlib.suppress(FileNotFoundError):  # `down` removed it between our two calls
            if state.lock.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def is_up(state: StateDir) -> bool:
    """Whether a supervisor holds the stack's lock."""
    if not state.lock.exists():
        return False
    try:
        with lock_stack(state):
            return False
    except LocalError:
        return True


def remove_home(state: StateDir) -> None:
    """Remove the lock, and the state folder if nothing else is in it."""
    with contextlib.suppress(LocalError, OSError), lock_stack(state):
        state.lock.unlink()
        state.home.rmdir()


def remove_leftovers(state: StateDir) -> int:
    """End every process of the stack (SIGTERM, then SIGKILL) and return how many there were."""
    found = [process for process, _ in marked(MARKER, os.fspath(state.home))]
    kill_all(found, signal.SIGTERM)
    _wait(found)
    kill_all(found, signal.SIGKILL)
    _wait(found)
    # a shell may have started another process between the look and the signal
    late = [process for process, _ in marked(MARKER, os.fspath(state.home))]
    kill_all(late, signal.SIGKILL)
    return len(found)


def _wait(processes: list[ProcessId]) -> None:
    deadline = time.monotonic() + _GRACE_S
    while any(process.alive for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
