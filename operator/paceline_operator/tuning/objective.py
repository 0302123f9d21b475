"""What a service promises, and how far a request is from breaking it. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline_core.wire import RequestRecord
from paceline_sim.slo import Slo

__all__ = ["Objective"]

_COMFORT = 0.2  # a request that is this share of the objective better than it must be counts in full
_JUDGED_TOKENS = 8  # an unfinished request's pace is told by so many tokens


@dataclass(frozen=True, slots=True)
class Objective:
    """Objectives in seconds (None: any time will do), and the percentage of requests that must meet them.

    `stated` is false where the service has none: the times then are a guard, made from what its users have now. `draining`:
    a queue keeps everybody beyond them, and what counts first is how fast it is worked off.
    """

    ttft: float | None
    tpot: float | None
    percentile: float = 95.0
    stated: bool = True
    draining: bool = False

    def slo(self, share: float = 1.0) -> Slo:
        """Return the objectives as the twin takes them, each times `share`."""
        ttft, tpot = (None if bound is None else bound * share for bound in (self.ttft, self.tpot))
        return Slo(ttft=ttft, tpot=tpot, percentile=self.percentile)

    def margin(self, record: RequestRecord, now: float) -> float | None:
        """Return by which share of the objective a request is within it (below 0: beyond, −1 at worst), None: not known yet.

        A refused request is at the worst; one that still waits is judged once it has waited longer than it may, one that
        still generates by the pace so far.
        """
        if record.outcome == "refused":
            return -1.0
        parts = [part for part in (self._first(record, now), self._pace(record, now)) if part is not None]
        if record.first_token is None and not parts:
            return None
        if record.outcome == "unfinished" and record.output_tokens < _JUDGED_TOKENS and not any(p < 0 for p in parts):
            return None
        return max(-1.0, min(parts, default=1.0))

    def waited(self, record: RequestRecord, now: float) -> bool:
        """Return whether a request waited longer for its first token than it may, or was refused: what queues do."""
        first = self._first(record, now)
        return record.outcome == "refused" or (first is not None and first < 0)

    def met(self, record: RequestRecord) -> bool:
        """Return whether a request that has ended was served within the objective."""
        margin = self.margin(record, record.end or record.arrival)
        return record.outcome == "finished" and margin is not None and margin >= 0

    def score(self, margin: float) -> float:
        """Return a margin as a figure from 0 (worst) to 1: comfortably within is as good as can be."""
        return min(1.0, max(0.0, (margin + 1.0) / (1.0 + _COMFORT)))

    @property
    def settle(self) -> float:
        """Seconds after its arrival by which a request can be judged: whoever has no token by then is at the worst."""
        if self.ttft is not None:
            return 2.0 * self.ttft
        return 4.0 * _JUDGED_TOKENS * (self.tpot or 0.1)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    def _first(self, record: RequestRecord, now: float) -> float | None:
        if self.ttft is None:
            return None
        if record.first_token is not None:
            return 1.0 - (record.first_token - record.arrival) / self.ttft
        waited = now - record.arrival
        return 1.0 - waited / self.ttft if waited > self.ttft else None

    def _pace(self, record: RequestRecord, now: float) -> float | None:
        if self.tpot is None or record.first_token is None or record.output_tokens < 2:
            return None
        if record.outcome == "unfinished" and record.output_tokens < _JUDGED_TOKENS:
            return None
        last = record.end if record.end is not None else now
        return 1.0 - (last - record.first_token) / (record.output_tokens - 1) / self.tpot
