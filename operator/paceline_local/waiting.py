"""Waiting with a limit."""

from __future__ import annotations

import asyncio

__all__ = ["set_within"]


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, at most `seconds` (None: without limit), and return whether it is set.

    Not `asyncio.wait_for`: before Python 3.12 that loses a cancellation which comes at the moment the event does.
    """
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
