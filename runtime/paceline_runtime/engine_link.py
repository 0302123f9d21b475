"""One engine process as the API process sees it: started, spoken to, waited for. Never reused after a death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from paceline_runtime.heap import engine_environment
from paceline_runtime.messages import FromEngine, ToEngine, decode_from_engine, encode
from paceline_runtime.settings import EngineSettings, SettingsError

__all__ = ["EngineLink"]

_AT_ONCE = 64  # messages that are taken before readers get their turn: about a second of steps, some milliseconds of work
_LAST_WORDS_MS = 100  # local sockets deliver at once; this only lets the reader run after the process has ended


def _check_length(folder: Path) -> None:
    """Unix sockets have short names. Raises `SettingsError` for a temporary folder that is too deep for one."""
    longest = len(os.fsencode(folder / "from-engine"))
    if longest > zmq.IPC_PATH_MAX_LEN:
        folder.rmdir()
        raise SettingsError(
            f"the temporary folder {folder.parent} is too long a name for a Unix socket ({longest} bytes, at most "
            f"{zmq.IPC_PATH_MAX_LEN}): set TMPDIR to a shorter one"
        )


class EngineLink:
    """Owns the process and its two sockets. `close` may be called at any time, more than once.

    The sockets' private folder is only there until the engine has said its first word: it is connected then, and nobody has
    to clean up after a server that was killed.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._folder: Path | None = Path(tempfile.mkdtemp(prefix="paceline-"))  # 0700: nobody else may speak to the engine
        _check_length(self._folder)
        self._context = zmq.asyncio.Context()
        self._outbox = self._open(zmq.PUSH)
        self._inbox = self._open(zmq.PULL)
        # the same one without futures, which cost more than most messages
        self._arrived: zmq.Socket[bytes] = zmq.Socket.shadow(self._inbox)
        self._process: asyncio.subprocess.Process | None = None

    def _open(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        return socket

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._process is not None, "start() first"
        return self._process.pid

    async def start(self) -> None:
        """Start the process and hand it its settings; its stdin stays open as its sign that we live."""
        to_engine, from_engine = (f"ipc://{self._folder}/{name}" for name in ("to-engine", "from-engine"))
        self._inbox.bind(from_engine)
        self._outbox.bind(to_engine)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "paceline_runtime.engine_process", to_engine, from_engine,
            stdin=asyncio.subprocess.PIPE, env=engine_environment(os.environ, self._settings.threads),
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        with contextlib.suppress(ConnectionError):  # it died already: `messages` will end and tell
            await self._process.stdin.drain()

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine; never waits."""
        self._outbox.send(encode(message))

    async def messages(self) -> AsyncIterator[FromEngine]:
        """Yield what the engine says, until its process has ended and its last words are read."""
        assert self._process is not None, "start() first"
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while not ended.done():
                received = asyncio.ensure_future(self._inbox.recv())
                await asyncio.wait({ended, received}, return_when=asyncio.FIRST_COMPLETED)
                if received.done():
                    self._remove_folder()
                    yield decode_from_engine(received.result())
                    for data in self._backlog():
                        yield decode_from_engine(data)
                else:
                    received.cancel()
            while await self._inbox.poll(_LAST_WORDS_MS):
                yield decode_from_engine(await self._inbox.recv())
        finally:
            ended.cancel()

    def _backlog(self) -> Iterator[bytes]:
        """Yield what has come meanwhile: a process that is behind then writes several tokens at once to each client."""
        for _ in range(_AT_ONCE):
            try:
                data = self._arrived.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield data

    @property
    def exit_text(self) -> str:
        """How the process ended, for people."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "is still running"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"was ended by signal {signal.Signals(-code).name}{hint}"

    async def close(self) -> None:
        """Kill the process if it lives, and remove what the link owns."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._context.destroy(linger=0)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
