"""Asks a contestant for a workload and times what comes: over HTTP (server-sent events) or over a driver's pipes."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import psutil
from bench.cpu_contestants import Launch
from bench.cpu_workload import Job, Workload

START_SECONDS = 300.0  # vLLM compiles at its first start
RUN_SECONDS = 560.0
READY_POLL = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's end: seconds from the start of its workload to the first and to the last token; what came."""

    first: float
    last: float
    tokens: int
    text: str | list[int]  # a server gives text, a driver token ids


# what our engine asks for by itself: large pages are worth a factor of two in a virtual machine, to everybody
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ContestantFailed(RuntimeError):
    """It didn't start, died, or gave something else than was asked for."""


class Running:
    """A contestant that was started; `version` is what it says it is. Close it."""

    version = ""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                launch.command, env=_HUGE_PAGES | os.environ | launch.env, stdin=subprocess.PIPE, stderr=output,
                stdout=subprocess.PIPE if launch.ready is None else output, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Return when it takes requests. Raises `ContestantFailed`."""
        raise NotImplementedError

    def run(self, workload: Workload) -> list[Answer]:
        """Ask for all of it at once and wait for the last token. Raises `ContestantFailed`."""
        answers = self._ask(workload.jobs)
        for job, answer in zip(workload.jobs, answers, strict=True):
            if answer.tokens != job.output:
                raise ContestantFailed(f"{answer.tokens} tokens of {job.output}")
        return answers

    def _ask(self, jobs: Sequence[Job]) -> list[Answer]:
        raise NotImplementedError

    def peak_bytes(self) -> int:
        """Return the sum of what each of its processes held at most."""
        parent = psutil.Process(self._process.pid)
        return sum(_peak(process.pid) for process in (parent, *parent.children(recursive=True)))

    def fail(self, why: str) -> ContestantFailed:
        return ContestantFailed(f"{why}; its log ends:\n{self._log.read_text(errors='replace')[-1500:]}")

    def close(self) -> None:
        """End it and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self._process.wait()


class Driven(Running):
    """An engine behind a driver: see `cpu_drivers/driver.py`."""

    def __init__(self, launch: Launch, log: Path) -> None:
        super().__init__(launch, log)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._stdin = self._process.stdin
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_read_lines, args=(self._process.stdout, self._lines), daemon=True).start()

    def wait_ready(self) -> None:
        self.version = str(self._read(START_SECONDS)["ready"])

    def _ask(self, jobs: Sequence[Job]) -> list[Answer]:
        asked = [{"prompt": job.prompt, "output": job.output} for job in jobs]
        try:
            self._stdin.write(json.dumps(asked).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self.fail("the driver is gone") from None
        return [Answer(r["first"], r["last"], len(r["tokens"]), r["tokens"]) for r in self._read(RUN_SECONDS)]

    def _read(self, seconds: float) -> Any:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise self.fail(f"the driver said nothing for {seconds:g} s") from None
        if not line:
            raise self.fail("the driver ended")
        return json.loads(line)


class Served(Running):
    """A server with OpenAI's API."""

    def __init__(self, launch: Launch, log: Path, port: int, version: str) -> None:
        super().__init__(launch, log)
        self._url = f"http://127.0.0.1:{port}"
        self.version = version
        self._ready = launch.ready or "/"

    def wait_ready(self) -> None:
        asyncio.run(self._wait_ready(self._ready))

    async def _wait_ready(self, path: str) -> None:
        end = time.monotonic() + START_SECONDS
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < end and self._process.poll() is None:
                try:
                    async with session.get(self._url + path) as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(READY_POLL)
        raise self.fail("the server isn't ready")

    def _ask(self, jobs: Sequence[Job]) -> list[Answer]:
        try:
            return asyncio.run(self._ask_all(jobs))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.fail(f"{type(error).__name__}: {error}") from error

    async def _ask_all(self, jobs: Sequence[Job]) -> list[Answer]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=RUN_SECONDS)) as session:
            began = time.perf_counter()
            return await asyncio.gather(*(self._stream(session, job, began) for job in jobs))

    async def _stream(self, session: aiohttp.ClientSession, job: Job, began: float) -> Answer:
        body = {
            "model": "smollm2", "prompt": job.prompt, "max_tokens": job.output, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        first = last = 0.0
        text, tokens = [], 0
        async with session.post(self._url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise self.fail(f"status {answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    last = time.perf_counter() - began
                    first = first or last
                    text.append(event["choices"][0].get("text") or "")
        return Answer(first, last, tokens, "".join(text))


def start(launch: Launch, log: Path, port: int, version: str) -> Running:
    """Start a contestant and wait until it is ready. Raises `ContestantFailed`."""
    running = Driven(launch, log) if launch.ready is None else Served(launch, log, port, version)
    try:
        running.wait_ready()
    except BaseException:
        running.close()
        raise
    return running


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read_lines(pipe: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def _peak(pid: int) -> int:
    """Return the most bytes that a process ever held, 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
