"""A log line for each slow request that says where its time went, at most a few a second."""

from __future__ import annotations

from collections.abc import Mapping

from paceline_core.wire import RequestRecord
from paceline_runtime.logs import log_event

__all__ = ["SlowRequestLog"]

_PER_SECOND = 5.0  # lines: in an overload everything is slow, and the log must not become the next problem
_BURST = 20.0


class SlowRequestLog:
    """Logs sequences that took longer than `threshold` (seconds), with their causes; a token bucket bounds the rate."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._allowance = _BURST
        self._at = 0.0
        self._left_out = 0

    def look(self, record: RequestRecord, seconds: float, now: float) -> bool:
        """Take a sequence that took `seconds`; return whether that is slow. `now` is monotonic."""
        if seconds <= self._threshold:
            return False
        self._allowance = min(_BURST, self._allowance + (now - self._at) * _PER_SECOND)
        self._at = now
        if self._allowance < 1.0:
            self._left_out += 1
            return True
        self._allowance -= 1.0
        self._write(record, seconds)
        return True

    def _write(self, record: RequestRecord, seconds: float) -> None:
        left_out, self._left_out = self._left_out, 0
        log_event(
            "slow_request",
            request_id=record.request_id,
            seconds=round(seconds, 6),
            outcome=record.outcome,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            ttft=None if record.first_token is None else round(record.first_token - record.arrival, 6),
            parts=_rounded(record.parts),
            delayed_by=_rounded(record.delayed_by),
            preempted_by=_rounded(record.preempted_by),
            left_out=left_out,
        )


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the larger first, in whole microseconds."""
    return {name: round(value, 6) for name, value in sorted(seconds.items(), key=lambda item: -item[1])}
