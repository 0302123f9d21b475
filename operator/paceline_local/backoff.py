"""How long to wait before the next attempt: to start a container that keeps ending, to reach an API server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["BackOff", "pauses"]


@dataclass(frozen=True, slots=True)
class BackOff:
    """Exponential back-off in seconds. As with a kubelet the first restart is immediate, and a long run forgives all.

    The figures are shorter than a kubelet's (10 s, 5 min, 10 min): this is a development tool, somebody is watching.
    """

    first: float = 1.0
    limit: float = 60.0
    forgive_after: float = 60.0
    failures: int = 0

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        if self.failures <= 1:
            return 0.0
        # the exponent is capped: 2.0 ** 2000 overflows
        return float(min(self.first * 2.0 ** min(self.failures - 2, 30), self.limit))

    def ended(self, ran_for: float) -> BackOff:
        """Return the state after a run of `ran_for` seconds."""
        return replace(self, failures=1 if ran_for >= self.forgive_after else self.failures + 1)


def pauses(first: float, limit: float) -> Iterator[float]:
    """Yield seconds without end, each twice the one before, up to `limit`."""
    while True:
        yield first
        first = min(2.0 * first, limit)
