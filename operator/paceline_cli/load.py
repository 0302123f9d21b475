"""A load generator for any OpenAI-compatible server: streams completions and measures them from outside."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline_cli.workload import LoadRequest

__all__ = ["LoadSummary", "Outcome", "percentile", "run_load", "summarise"]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request did, in seconds from the start of the load. `error` is empty if it was answered in full.

    `gaps` are the seconds between the events of its stream (of one token each, where the server doesn't bundle them);
    `last_token` is the time of the last of them.
    """

    sent: float
    first_token: float | None
    end: float
    output_tokens: int
    error: str = ""
    prompt_tokens: int = 0
    last_token: float | None = None
    gaps: tuple[float, ...] = ()

    @property
    def latency(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end - self.sent

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None where there is none."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """A load in figures: tokens per second over its whole length, latencies in seconds."""

    requests: int
    failed: int
    duration: float
    output_tokens_per_s: float
    mean_latency: float
    p95_latency: float
    ttft_p50: float
    ttft_p95: float


async def run_load(
    base_url: str,
    model: str,
    requests: Sequence[LoadRequest],
    *,
    timeout: float = 600.0,  # noqa: ASYNC109  a bound per request that httpx applies between bytes
    progress: Progress | None = None,
    concurrency: int | None = None,
    api_key: str | None = None,
) -> list[Outcome]:
    """Send every request at its time, stream the answers, and return one outcome each, in order.

    `base_url` is the server's root (`http://host:port`). With `concurrency` so many clients send one request after the other
    instead (closed loop), whatever their times. A request that fails has its `error` set; nothing is raised for it.
    """
    # every request opens a connection of its own, so that a balancer spreads requests rather than clients
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(
        base_url=base_url, timeout=timeout, limits=limits, trust_env=False, headers=headers
    ) as client:
        sender = _Sender(
            client, model, time.monotonic(), progress, None if concurrency is None else asyncio.Semaphore(concurrency)
        )
        return await asyncio.gather(*(sender.send(request) for request in requests))


@dataclass(slots=True)
class _Tally:
    """What a stream has brought so far; times are seconds from the start of the load."""

    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    def take(self, event: dict[str, Any], now: float) -> None:
        if (choices := event.get("choices")) and not (self.last is not None and all(map(_only_ends, choices))):
            if self.last is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.last = now
        if event.get("error"):
            self.error = str(event["error"])
        usage = event.get("usage") or {}
        self.tokens = usage.get("completion_tokens", self.tokens)
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Sender:
    client: httpx.AsyncClient
    model: str
    start: float
    progress: Progress | None
    slots: asyncio.Semaphore | None

    async def send(self, request: LoadRequest) -> Outcome:
        """Send one request at its time, or when a client of the closed loop is free."""
        if self.slots is None:
            await asyncio.sleep(max(0.0, self.start + request.at - time.monotonic()))
            return await self._stream(request)
        async with self.slots:
            return await self._stream(request)

    async def _stream(self, request: LoadRequest) -> Outcome:
        sent, tally = self._now(), _Tally()
        try:
            async with self.client.stream("POST", "/v1/completions", json=self._body(request)) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    tally.error = f"HTTP {response.status_code}: {response.text[:200]}"
                else:
                    async for event in _events(response):
                        tally.take(event, self._now())
        except (httpx.HTTPError, ValueError) as failure:  # ValueError: an event that is no JSON
            tally.error = f"{type(failure).__name__}: {failure}"
        if not tally.error and tally.tokens != request.max_tokens:
            tally.error = f"got {tally.tokens} of {request.max_tokens} tokens"
        if self.progress is not None:
            self.progress(tally.tokens)
        return Outcome(
            sent, tally.first, self._now(), tally.tokens, tally.error, tally.prompt_tokens, tally.last, tuple(tally.gaps)
        )

    def _now(self) -> float:
        return time.monotonic() - self.start

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,  # lengths are the workload's, not the model's
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _only_ends(choice: dict[str, Any]) -> bool:
    """Whether a choice's event says that it has ended, and nothing else: it comes at once after the last token."""
    return bool(choice.get("finish_reason")) and not choice.get("text")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event until `[DONE]`."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def summarise(outcomes: Sequence[Outcome]) -> LoadSummary:
    """Return the figures of a load. Failed requests count in `failed` only; raises `ValueError` if all failed."""
    good = [o for o in outcomes if not o.error]
    if not good:
        raise ValueError(f"no request was answered; the first error was: {outcomes[0].error if outcomes else 'no request'}")
    duration = max(o.end for o in good) - min(o.sent for o in good)
    latencies = [o.latency for o in good]
    ttfts = [o.first_token - o.sent for o in good if o.first_token is not None]
    return LoadSummary(
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        duration=duration,
        output_tokens_per_s=sum(o.output_tokens for o in good) / duration,
        mean_latency=sum(latencies) / len(latencies),
        p95_latency=percentile(latencies, 0.95),
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p95=percentile(ttfts, 0.95),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile (`share` in (0, 1]) of `values`, NaN if there are none."""
    if not values:
        return math.nan
    return sorted(values)[math.ceil(share * len(values)) - 1]
