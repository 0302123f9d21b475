"""The clocks behind `causes.py`: what the queue waited for, and what steps cost those that were in them, as running totals.

A request's share of a total is the difference between two readings, so a step costs nothing per running sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from paceline_core.request import WaitReason

__all__ = ["NOISE", "QUEUE_PARTS", "QueueClocks", "StepHistory", "StepShare", "WaitSnapshot"]

QUEUE_PARTS = ("boundary", *(reason.value for reason in WaitReason))  # parts of the time in the queue
NOISE = 1e-6  # seconds: what is shorter than a microsecond is rounding, not a gap
_TRIM_AT = 8192  # steps remembered before those are dropped that nobody's time reaches back to


@dataclass(slots=True)
class WaitSnapshot:
    """The readings of the queue's clocks at an arrival at time `at`."""

    at: float
    waited: dict[str, float]
    gaps: dict[str, float]


class QueueClocks:
    """How long the queue has waited for each reason, ever, and how much of that the engine stood still."""

    def __init__(self) -> None:
        self._waited = dict.fromkeys(QUEUE_PARTS, 0.0)
        self._gaps = dict.fromkeys(QUEUE_PARTS, 0.0)
        self._reason = "boundary"
        self._since = 0.0
        self._last_gap = (0.0, 0.0, "boundary")
        self._fresh: list[WaitSnapshot] = []  # arrivals since the last gap: the next one may have begun before them

    def switch(self, reason: WaitReason | None, now: float) -> None:
        """Note what the first of the queue waits for from `now` on; None: nobody was waiting."""
        name = "boundary" if reason is None else reason.value
        if name != self._reason:
            self._waited[self._reason] += now - self._since
            self._reason, self._since = name, now

    def gap(self, start: float, end: float) -> None:
        """Note that the engine stood still from `start` to `end`, while the reason in force now was in force."""
        if end - start >= NOISE:
            self._gaps[self._reason] += end - start
            self._last_gap = (start, end, self._reason)
            for snapshot in self._fresh:
                snapshot.gaps[self._reason] += _overlap(start, min(end, snapshot.at), start)
        self._fresh.clear()

    def arrive(self, at: float) -> WaitSnapshot:
        """Return the readings at an arrival, which may be told late: after the gap in which it came."""
        snapshot = WaitSnapshot(at, self._waited_at(at), dict(self._gaps))
        start, end, reason = self._last_gap
        snapshot.gaps[reason] -= _overlap(start, end, at)
        self._fresh.append(snapshot)
        return snapshot

    def since(self, snapshot: WaitSnapshot, now: float) -> tuple[dict[str, float], float]:
        """Return the seconds by reason from an arrival until `now`, and those in which the engine stood still."""
        waited = self._waited_at(now)
        parts, still = {}, 0.0
        for name in QUEUE_PARTS:
            span = waited[name] - snapshot.waited[name]
            gap = min(max(span, 0.0), self._gaps[name] - snapshot.gaps[name])
            parts[name] = span - gap
            still += gap
        return parts, still

    def _waited_at(self, at: float) -> dict[str, float]:
        clocks = dict(self._waited)
        clocks[self._reason] += at - self._since
        return clocks


@dataclass(frozen=True, slots=True)
class StepShare:
    """A step with chunks of prompts: how long it took, what of that its decodes lost, and each chunk's share (0 to 1)."""

    end: float
    duration: float
    delay: float
    owners: tuple[tuple[int, float], ...]


class StepHistory:
    """When steps ended, how much chunks have delayed decodes until then, and how long the engine has stood still, ever."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._delays: list[float] = []
        self._gaps: list[float] = []
        self._shares: list[StepShare] = []
        self._share_ends: list[float] = []
        self._trim_at = _TRIM_AT

    def __len__(self) -> int:
        return len(self._ends) + len(self._share_ends)

    @property
    def is_long(self) -> bool:
        """True when it is time to `trim`."""
        return len(self) > self._trim_at

    def add(self, end: float, delay: float, gap: float) -> None:
        """Note what a step cost that ended at `end`; one that cost nothing leaves no entry."""
        if not delay and gap < NOISE:
            return
        self._ends.append(end)
        self._delays.append((self._delays[-1] if self._delays else 0.0) + delay)
        self._gaps.append((self._gaps[-1] if self._gaps else 0.0) + gap)

    def add_share(self, share: StepShare) -> None:
        """Note whose chunks a step computed."""
        self._shares.append(share)
        self._share_ends.append(share.end)

    def cost(self, start: float, end: float) -> tuple[float, float]:
        """Return the delay by chunks and the gaps, in seconds, of the steps that ended in (start, end]."""
        low, high = bisect_right(self._ends, start), bisect_right(self._ends, end)
        return _between(self._delays, low, high), _between(self._gaps, low, high)

    def shares(self, start: float, end: float) -> Iterator[StepShare]:
        """Yield the steps with chunks that ended in (start, end]."""
        return islice(self._shares, bisect_right(self._share_ends, start), bisect_right(self._share_ends, end))

    def trim(self, until: float) -> None:
        """Forget what ended at or before `until`, but for the totals."""
        keep = max(0, bisect_right(self._ends, until) - 1)  # one entry more: it holds the totals so far
        del self._ends[:keep], self._delays[:keep], self._gaps[:keep]
        gone = bisect_right(self._share_ends, until)
        del self._share_ends[:gone], self._shares[:gone]
        self._trim_at = max(_TRIM_AT, 2 * len(self))  # a request that runs for long keeps much: don't look each step


def _overlap(start: float, end: float, since: float) -> float:
    """Return how much of start to end lies after `since`."""
    return max(0.0, end - max(start, since))


def _between(totals: list[float], low: int, high: int) -> float:
    """Return what entries [low, high) added to a running total."""
    if high <= low:
        return 0.0
    return totals[high - 1] - (totals[low - 1] if low else 0.0)
