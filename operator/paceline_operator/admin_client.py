"""Calls to the admin port of one pod: read the knobs, change them. Bounded in time and size, never through a proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from paceline_core.errors import FormatError
from paceline_core.wire import KnobsDocument, KnobsPatch, from_json, to_json
from paceline_operator.errors import AdminError
from paceline_operator.leader import Elected, Leadership
from paceline_operator.pod import ADMIN_PORT
from paceline_operator.pod_session import pod_session

__all__ = ["AdminClient"]

_MOST_BYTES = 1 << 20  # a knobs document has about 1 kB


class AdminClient:
    """Talks to `http://POD_IP:9000/admin/knobs` with the service's derived token. Raises `AdminError`.

    Changes carry the fencing number of `leadership`, and aren't sent once that is over.
    """

    def __init__(
        self, *, timeout: float, concurrency: int, port: int = ADMIN_PORT, leadership: Leadership | None = None
    ) -> None:
        self._port = port
        self._leadership = leadership or Elected()
        self._slots = asyncio.Semaphore(concurrency)
        self._session = pod_session(timeout=timeout, connections=concurrency)

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()

    @property
    def fence(self) -> int:
        """The fencing number that changes carry; 0: none."""
        return self._leadership.fence()

    async def knobs(self, address: str, token: str) -> KnobsDocument:
        """Return the pod's knobs."""
        return _knobs(await self._call("GET", "/admin/knobs", address, token), address)

    async def progress(self, address: str, token: str) -> tuple[int, int] | None:
        """Return the bytes that a pod has fetched and those of its model, None if it doesn't say."""
        try:
            found = await self._call("GET", "/admin/progress", address, token)
            return int(found["done"]), int(found["total"])
        except (AdminError, KeyError, TypeError, ValueError):
            return None

    async def patch_knobs(self, address: str, token: str, knobs: Mapping[str, Any], revision: int) -> KnobsDocument:
        """Change `knobs` (wire form) unless the pod has left `revision` behind; return what is in force then."""
        if not self._leadership.may_act():
            raise AdminError(0, "this operator doesn't lead any more")
        body = to_json(KnobsPatch(knobs, self._leadership.fence()))
        answer = await self._call("PATCH", "/admin/knobs", address, token, body, {"If-Match": f'"{revision}"'})
        return _knobs(answer, address)

    async def _call(
        self, verb: str, path: str, address: str, token: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._port}{path}"
        authorised = {"Authorization": f"Bearer {token}", **(headers or {})}
        try:
            async with (
                self._slots,
                self._session.request(verb, url, json=body, headers=authorised, allow_redirects=False) as response,
            ):
                text = await _whole(response.content)
        except TimeoutError:
            raise AdminError(0, f"{address}:{self._port} doesn't answer") from None
        except aiohttp.ClientError as error:
            raise AdminError(0, f"{address}:{self._port}: {error}") from None
        return _data(response.status, text, address)


async def _whole(stream: aiohttp.StreamReader) -> bytes:
    """Return the body, cut at the limit. One read returns what has arrived: a body of several segments takes more."""
    text = b""
    async for chunk in stream.iter_any():
        text += chunk
        if len(text) >= _MOST_BYTES:
            break
    return text[:_MOST_BYTES]


def _data(status: int, text: bytes, address: str) -> Any:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if status != 200:
        raise AdminError(status, f"{address}: HTTP {status}: {_complaint(data, text)}")
    return data


def _knobs(data: Any, address: str) -> KnobsDocument:
    try:
        return from_json(KnobsDocument, data)
    except FormatError as error:
        raise AdminError(200, f"{address}: {error}") from None


def _complaint(data: Any, text: bytes) -> str:
    """Return the pod's own words: OpenAI's error shape, a plain `detail` or `message`, else the start of the body."""
    if isinstance(data, Mapping):
        error = data.get("error", data)
        for name in ("message", "detail"):
            if isinstance(error, Mapping) and error.get(name):
                return str(error[name])
    return text[:200].decode(errors="replace")
