"""Asks pods what they saw: `GET /admin/observe` from the last cursor on, bounded in number, size and time.

A pod that doesn't speak the contract is asked for its gauges on `/metrics` instead. A pod that is slow or gone costs one
slot for one time-out, and nobody else anything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from paceline_core.errors import FormatError
from paceline_core.wire import Gauges, ObserveDocument, from_json
from paceline_operator.pod import ADMIN_PORT, HTTP_PORT
from paceline_operator.pod_session import pod_session
from paceline_operator.tuning.ledger import Health, PodLedger

__all__ = ["Scraper", "Source"]

logger = logging.getLogger(__name__)

_MOST_BYTES = 8 << 20  # a page of 5,000 records has about 1 MB, with long prompts' hashes a few
_MOST_PAGES = 8  # per look: a pod that is far behind catches up over several
_PAGE = 5000
_STEPS = 64  # per page that are read, evenly spaced: enough for medians, and most of the cost of reading
_GAUGES = {"vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting"}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a pod answers, and with which token."""

    name: str
    address: str
    token: str


class Scraper:
    """Reads pods into their ledgers. `clock` is Unix seconds."""

    def __init__(
        self, *, timeout: float, concurrency: int, clock: Callable[[], float] = time.time, admin_port: int = ADMIN_PORT,
        http_port: int = HTTP_PORT,
    ) -> None:  # fmt: skip
        self._slots = asyncio.Semaphore(concurrency)
        self._clock, self._admin_port, self._http_port = clock, admin_port, http_port
        self._session = pod_session(timeout=timeout, connections=concurrency)

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()

    async def look(self, sources: Sequence[tuple[Source, PodLedger]]) -> None:
        """Ask all pods at once, as many as there are slots."""
        await asyncio.gather(*(self._one(source, ledger) for source, ledger in sources))

    async def _one(self, source: Source, ledger: PodLedger) -> None:
        async with self._slots:
            try:
                await self._ask(source, ledger)
            except Exception as error:  # nonsense that nobody has thought of must not spoil what others tell
                logger.exception("what the pod %s tells can't be taken", source.name)
                ledger.fail(Health.LYING, f"what it tells can't be taken: {type(error).__name__}: {error}")

    async def _ask(self, source: Source, ledger: PodLedger) -> None:
        try:
            await self._pages(source, ledger)
        except TimeoutError:
            ledger.fail(Health.SILENT, "it doesn't answer in time")
        except aiohttp.ClientError as error:
            ledger.fail(Health.SILENT, f"it can't be reached: {error}")
        except _Strange as error:
            await self._gauges(source, ledger, str(error))

    async def _pages(self, source: Source, ledger: PodLedger) -> None:
        for _ in range(_MOST_PAGES):
            document, records = await self._page(source, ledger)
            ledger.absorb(document, self._clock())
            if records < _PAGE or not ledger.fresh:
                return

    async def _page(self, source: Source, ledger: PodLedger) -> tuple[ObserveDocument, int]:
        query = {"since": str(ledger.cursor)} | ({"instance": ledger.instance} if ledger.instance else {})
        url = f"http://{_host(source.address)}:{self._admin_port}/admin/observe"
        headers = {"Authorization": f"Bearer {source.token}"}
        async with self._session.get(url, params=query, headers=headers, allow_redirects=False) as answer:
            text = await _whole(answer.content)
            status = answer.status
        if status != 200:
            raise _Strange(f"/admin/observe answers HTTP {status}")
        return _document(text)

    async def _gauges(self, source: Source, ledger: PodLedger, why: str) -> None:
        """Fall back to the gauges of `/metrics`, which any version has."""
        try:
            url = f"http://{_host(source.address)}:{self._http_port}/metrics"
            async with self._session.get(url, allow_redirects=False) as answer:
                text = (await _whole(answer.content)).decode(errors="replace")
            ledger.gauges_only(_read_gauges(text), self._clock(), why)
        except (TimeoutError, aiohttp.ClientError, _Strange, ValueError):
            ledger.fail(Health.OLD, why)


class _Strange(Exception):
    """The pod answers, but not as the contract says."""


async def _whole(stream: aiohttp.StreamReader) -> bytes:
    text = bytearray()
    async for chunk in stream.iter_any():
        text += chunk
        if len(text) > _MOST_BYTES:
            raise _Strange(f"its answer is larger than {_MOST_BYTES >> 20} MiB")
    return bytes(text)


def _document(text: bytes) -> tuple[ObserveDocument, int]:
    """Return the document with few of its steps, and how many records it had."""
    try:
        data: Any = json.loads(text)
        steps, requests = data["steps"], data["requests"]
        records = len(steps) + sum(r.get("outcome") != "unfinished" for r in requests)
        data["steps"] = steps[:: max(1, len(steps) // _STEPS)]
        return from_json(ObserveDocument, data), records
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, FormatError) as error:
        raise _Strange(f"/admin/observe can't be read: {error}") from None


def _read_gauges(text: str) -> Gauges:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _GAUGES and 0 <= sample.value < 1e9:
                found[_GAUGES[sample.name]] = int(sample.value)
    return Gauges(**found)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
