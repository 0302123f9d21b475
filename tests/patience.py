"""Waiting in tests that have a time limit only so that they end."""

import time

_ROUND = 1.0  # seconds of one round that count at most


def eventually(check, what, timeout=90.0, interval=0.1):
    """Return the first truthy result of `check`; fail with `what` once `timeout` seconds have passed.

    A round that takes long had to wait for a processor, and so had what it waits for: of such a round only a second counts.
    A machine that is overloaded, or stands still for a while, makes a test longer and not red.
    """
    left, before = timeout, time.monotonic()
    while True:
        if found := check():
            return found
        assert left > 0, f"didn't happen in {timeout:g} s: {what}"
        time.sleep(interval)
        now = time.monotonic()
        left, before = left - min(now - before, _ROUND), now
