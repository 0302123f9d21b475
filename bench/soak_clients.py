"""Clients of a soak: good, hasty, slow and wrong ones. Each request must end in an answer or a clean error."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATIENCE = 120.0  # seconds for a whole request: one that takes longer hangs
SLOW_READ = 0.05  # seconds between two events that a slow reader takes
STALL = 8.0  # longer than the server's read timeout
CLEAN = {429, 503, 504}
WRONG: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b"[]", 400),
    (b'{"prompt": "x", "speed": 11}', 400),
    (b'{"prompt": "x", "max_tokens": -1}', 400),
    (b'{"prompt": "x", "temperature": "hot"}', 400),
    (b'{"prompt": []}', 400),
    (b'{"prompt": "x", "max_tokens": 1000000}', 400),
    (b'{"prompt": "x", "model": "nobody"}', 404),
    (b"\xff\xfe", 400),
)


@dataclass(slots=True)
class Tally:
    """How requests ended: `answers` by kind, `errors` by code, and what must not happen, with an example each."""

    answers: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        return self.answers.total() + self.errors.total() + self.violations.total()


class Violation(Exception):
    """An end that no client should see."""


class Clients:
    """`count` clients at once against `url`, until `stop` is set."""

    def __init__(self, url: str, count: int, seed: int) -> None:
        self._url = url
        self._count = count
        self._seed = seed
        self.tally = Tally()
        self.stop = asyncio.Event()
        self._asked_for_pause = False

    async def run(self) -> None:
        """Run until stopped; then every request that is on its way is waited for."""
        session = aiohttp.ClientSession(
            self._url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=PATIENCE)
        )
        async with session, asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._client(session, random.Random(f"{self._seed}/{number}")))

    async def _client(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        kinds = (self._stream, self._whole, self._leaver, self._slow, self._staller, self._wrong)
        while not self.stop.is_set():
            (kind,) = draw.choices(kinds, (50, 25, 10, 5, 2, 8))
            try:
                await kind(session, draw)
            except Violation as violation:
                self.tally.violations[str(violation)] += 1
            except TimeoutError:
                self.tally.violations[f"{kind.__name__}: no end within {PATIENCE:g} s"] += 1
            except (aiohttp.ClientError, ConnectionError) as error:
                self.tally.violations[f"{kind.__name__}: {type(error).__name__}"] += 1
            pause, self._asked_for_pause = self._asked_for_pause, False
            await asyncio.sleep(draw.expovariate(4.0) + pause)  # the next of the crowd is it that obeys a Retry-After

    async def _whole(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        body = _body(draw)
        async with session.post("/v1/completions", json=body, headers=_headers(draw)) as answer:
            if await self._is_error(answer):
                return
            usage = (await answer.json())["usage"]
            if usage["completion_tokens"] != body["max_tokens"]:
                raise Violation(f"whole: {usage['completion_tokens']} tokens of {body['max_tokens']}")
            self.tally.answers["whole"] += 1

    async def _stream(
        self, session: aiohttp.ClientSession, draw: random.Random, pause: float = 0.0, kind: str = "stream"
    ) -> None:
        async with session.post("/v1/completions", json={**_body(draw), "stream": True}, headers=_headers(draw)) as answer:
            if await self._is_error(answer):
                return
            last: Any = None
            async for event in _events(answer):
                last = event
                if pause:
                    await asyncio.sleep(pause)
            if last == "[DONE]":
                self.tally.answers[kind] += 1
            elif isinstance(last, dict) and "error" in last:
                self.tally.errors[f"stream: {last['error']['code']}"] += 1
            else:
                raise Violation(f"{kind}: a stream without an end")

    async def _slow(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        await self._stream(session, draw, SLOW_READ, "slow reader")

    async def _leaver(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        """Leave in the middle: before the headers, or after some events."""
        request = session.post("/v1/completions", json={**_body(draw), "stream": True})
        try:
            async with asyncio.timeout(draw.uniform(0.0, 1.5)), request as answer:
                if await self._is_error(answer):
                    return
                async for _ in _events(answer):
                    pass
        except TimeoutError:
            self.tally.answers["left"] += 1
        else:
            self.tally.answers["stayed"] += 1

    async def _staller(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        """Ask and read nothing for longer than the server allows; whether all fits into buffers is the kernel's choice."""
        async with session.post("/v1/completions", json={**_body(draw), "stream": True}) as answer:
            if await self._is_error(answer):
                return
            await asyncio.sleep(STALL)
            answer.close()
            self.tally.answers["stalled"] += 1

    async def _wrong(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        data, status = draw.choice(WRONG)
        async with session.post("/v1/completions", data=data, headers={"Content-Type": "application/json"}) as answer:
            body = await answer.json()
            if answer.status not in (status, *CLEAN) or "message" not in body["error"]:
                raise Violation(f"wrong: {answer.status} for {data!r}")
            self.tally.errors[f"wrong: {answer.status}"] += 1

    async def _is_error(self, answer: aiohttp.ClientResponse) -> bool:
        """Take an error that a client can do something about. Raises `Violation` for any other."""
        if answer.status == 200:
            return False
        body = await answer.json()
        if answer.status not in CLEAN or (answer.status != 504 and "Retry-After" not in answer.headers):
            raise Violation(f"status {answer.status}: {body}"[:200])
        self._asked_for_pause = True
        self.tally.errors[f"{answer.status} {body['error']['code']}"] += 1
        return True


def _body(draw: random.Random) -> dict[str, Any]:
    # a few common beginnings, so that there is something to share, and a few long prompts, so that chunks delay others
    start = f"system prompt {draw.randrange(6)} " * 12
    length = draw.choice((20, 60, 200, 200, 600, 1500))
    output = min(400, 1 + int(draw.expovariate(1 / 60)))
    # a real model would end some answers early, and then nobody could tell whether one is whole
    return {"prompt": start + "x" * draw.randint(1, length), "max_tokens": output, "ignore_eos": True}


def _headers(draw: random.Random) -> dict[str, str]:
    headers = {"X-Request-Priority": draw.choice(("interactive", "interactive", "batch"))}
    if draw.random() < 0.1:
        headers["X-Request-Timeout"] = f"{draw.choice((1, 5, 30))}s"
    return headers


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip().decode()
            yield data if data == "[DONE]" else json.loads(data)
