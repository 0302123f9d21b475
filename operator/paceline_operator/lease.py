"""Who leads, decided by a Lease: the rules, pure, on plain data and monotonic seconds.

Clocks of different machines are never compared. A candidate notes at which of its own monotonic seconds the Lease last
changed; if it doesn't change for its whole duration, its holder is gone. A holder counts from the moment *before* it sent
the renewal that was accepted, so it gives up before anybody else may start.

The fencing number is the Lease's `leaseTransitions`: every acquisition raises it, also by the same holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

__all__ = ["Record", "Times", "View", "claim", "release", "renewal"]

_EPOCH = 1_704_067_200  # 2024-01-01: the first fencing number of a new Lease is the seconds since then, which fit in 31 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds: a Lease that isn't renewed for `duration` is free; a holder that couldn't renew for `deadline` stops; `retry`
    passes between attempts.

    A leader that is killed is followed after at most duration + retry = 11 s, so in less than the 15 s that are promised
    together with the first pass. The 3 s between deadline and duration are the room for clocks that run at different speeds
    and for a write that is under way.
    """

    duration: float = 9.0
    deadline: float = 6.0
    retry: float = 2.0

    @classmethod
    def of(cls, duration: float) -> Times:
        """Return times in the same proportions for another duration."""
        return cls(duration=duration, deadline=duration * 2 / 3, retry=duration * 2 / 9)


@dataclass(frozen=True, slots=True)
class Record:
    """What a Lease says; `holder` is empty if it was released. `version` is the object's, empty if there is none."""

    holder: str = ""
    transitions: int = 0
    duration: float = 0.0
    renewed: str = ""
    version: str = ""

    @classmethod
    def of(cls, lease: Mapping[str, Any] | None) -> Record:
        """Return the record in a Lease object (None: there is none)."""
        if lease is None:
            return cls()
        spec = lease.get("spec") or {}
        return cls(
            str(spec.get("holderIdentity") or ""),
            int(spec.get("leaseTransitions") or 0),
            float(spec.get("leaseDurationSeconds") or 0),
            str(spec.get("renewTime") or ""),
            str(lease["metadata"].get("resourceVersion") or ""),
        )


@dataclass(frozen=True, slots=True)
class View:
    """A Lease as one candidate sees it: the record, and since when (its own monotonic seconds) it has been that."""

    record: Record
    since: float

    def updated(self, record: Record, now: float) -> View:
        """Return the view after another look at `now`."""
        return replace(self, record=record) if record == self.record else View(record, now)

    def is_free(self, me: str, duration: float, now: float) -> bool:
        """Return whether the Lease may be taken: released, never held, or not renewed for its duration.

        The holder's own duration counts if it is longer than ours: it was told that it has so much time.
        """
        holder = self.record.holder
        return holder in ("", me) or now - self.since >= max(duration, self.record.duration)


def claim(record: Record, me: str, duration: float, now: datetime) -> dict[str, Any]:
    """Return the spec of a Lease that `me` takes. A new Lease starts high, so that one that was deleted and made again
    doesn't lead back to numbers that pods have seen exceeded."""
    first = max(0, int(now.timestamp()) - _EPOCH)
    transitions = record.transitions + 1 if record.version else first
    return _spec(me, transitions, duration, now) | {"acquireTime": _micro(now)}


def renewal(lease: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the spec of a Lease that its holder renews."""
    return {**lease["spec"], "renewTime": _micro(now)}


def release(lease: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the spec of a Lease that its holder gives back: the next candidate that looks takes it at once."""
    return {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro(now)}


def _spec(me: str, transitions: int, duration: float, now: datetime) -> dict[str, Any]:
    return {
        "holderIdentity": me,
        "leaseDurationSeconds": max(1, round(duration)),
        "leaseTransitions": transitions,
        "renewTime": _micro(now),
    }


def _micro(now: datetime) -> str:
    """Return a time as the API writes a MicroTime."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
