"""A load generator for any OpenAI-compatible server: streams completions and measures them from outside."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from paceline_cli.workload import LoadRequest

__all__ = ["LoadSummary", "Outcome", "percentile", "run_load", "summarise"]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request did, in seconds from the start of the load. `error` is empty if it was answered in full."""

    sent: float
    first_token: float | None
    end: float
    output_tokens: int
    error: str = ""

    @property
    def latency(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end - self.sent


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
) -> list[Outcome]:
    """Send every request at its time, stream the answers, and return one outcome each, in order.

    `base_url` is the server's root (`http://host:port`). A request that fails has its `error` set; nothing is raised for it.
    """
    # every request opens a connection of its own, so that a balancer spreads requests rather than clients
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    start = time.monotonic()
    async with httpx.AsyncClient(base_url=base_url, timeout=timeout, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(_one(client, model, request, start, progress) for request in requests))


async def _one(
    client: httpx.AsyncClient, model: str, request: LoadRequest, start: float, progress: Progress | None
) -> Outcome:
    await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
    sent = time.monotonic() - start
    first: float | None = None
    tokens, error = 0, ""
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,  # lengths are the workload's, not the model's
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                error = f"HTTP {response.status_code}: {response.text[:200]}"
            else:
                async for event in _events(response):
                    if first is None and event.get("choices"):
                        first = time.monotonic() - start
                    if event.get("error"):
                        error = str(event["error"])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    if not error and tokens != request.max_tokens:
        error = f"got {tokens} of {request.max_tokens} tokens"
    if progress is not None:
        progress(tokens)
    return Outcome(sent, first, time.monotonic() - start, tokens, error)


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
