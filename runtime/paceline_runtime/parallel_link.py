"""The first rank's side of a tensor-parallel group: starts the others, tells them what to compute, sees them end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline_runtime.logs import log_event
from paceline_runtime.parallel_group import RankDied
from paceline_runtime.parallel_messages import write_message
from paceline_runtime.settings import EngineSettings

__all__ = ["READY", "FollowerLink"]

READY = b"ready\n"  # what a follower says once it may be waited for
_PATIENCE_SECONDS = 5.0  # for processes that were told to end


class FollowerLink:
    """Starts ranks 1, 2, … of a group of `size` with the engine's own settings. Their stdin carries what to compute.

    They read it in order and end with it, so none is left behind. `store` is the file by which the ranks find each other.
    """

    def __init__(self, settings: EngineSettings, size: int, backend: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-ranks-"))  # 0700: nobody else may join
        self.store = self._folder / "store"
        self._closing = False
        self._followers = [_start(settings, rank, size, backend, self.store) for rank in range(1, size)]
        try:
            for rank, follower in enumerate(self._followers, 1):
                assert follower.stdout is not None
                if follower.stdout.readline() != READY:
                    raise RankDied(_end_text(rank, follower))
        except RankDied:
            self.close()
            raise

    def send(self, kind: str, **parts: object) -> None:
        """Send a message to every other rank. Raises `RankDied`."""
        for follower in self._followers:
            assert follower.stdin is not None
            try:
                write_message(follower.stdin, kind, parts)  # type: ignore[arg-type]
            except OSError:
                self.check_broken()
                raise

    def check(self) -> None:
        """Raise `RankDied` if a rank has ended."""
        for rank, follower in enumerate(self._followers, 1):
            if follower.poll() is not None:
                raise RankDied(_end_text(rank, follower))

    def check_broken(self) -> None:
        """An exchange broke off: wait for the rank that ended, and raise `RankDied` for it."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            self.check()
            time.sleep(0.01)

    def watch(self, died: Callable[[], None]) -> None:
        """Call `died`, from a thread of its own, when a rank ends before `close`: a GPU's exchanges never give up."""

        def wait(rank: int, follower: subprocess.Popen[bytes]) -> None:
            follower.wait()
            if not self._closing:
                log_event("rank_died", level=logging.ERROR, rank=rank, reason=_end_text(rank, follower))
                died()

        for rank, follower in enumerate(self._followers, 1):
            threading.Thread(target=wait, args=(rank, follower), name=f"rank-{rank}", daemon=True).start()

    def close(self) -> None:
        """End the other ranks."""
        self._closing = True
        for follower in self._followers:
            for pipe in (follower.stdin, follower.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
        for follower in self._followers:
            try:
                follower.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _start(settings: EngineSettings, rank: int, size: int, backend: str, store: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline_runtime.parallel_worker", str(rank), str(size), backend, str(store)]
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
    assert follower.stdin is not None
    with contextlib.suppress(OSError):  # it died already, which the wait for its first word will tell
        follower.stdin.write(msgspec.json.encode(settings) + b"\n")
        follower.stdin.flush()
    return follower


def _end_text(rank: int, follower: subprocess.Popen[bytes]) -> str:
    code = follower.wait()
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return f"rank {rank} of the tensor-parallel group ended with {how}; its last log lines say why"
