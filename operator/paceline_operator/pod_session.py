"""HTTP sessions to pods."""

from __future__ import annotations

import aiohttp

__all__ = ["pod_session"]


def pod_session(*, timeout: float, connections: int) -> aiohttp.ClientSession:
    """Return a session for requests to pods of at most `timeout` seconds each and so many `connections` at once.

    A pod's address may be anybody's a moment later: no cookies, no proxies, no kept connections.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout),
        connector=aiohttp.TCPConnector(force_close=True, limit=connections),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )
