"""What is counted while a replay runs: step by step, the same whether steps were planned or skipped."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Point", "Tally"]

_POINTS = 240  # of the time series at most: a plot or a wide terminal shows no more
_FINEST = 1e-3  # seconds of an interval to begin with; it doubles whenever the points become too many


@dataclass(frozen=True, slots=True)
class Point:
    """The steps that ended within one interval of the time series, which begins at `start` (seconds).

    `tokens` were generated and `prefill` prompt tokens computed in `steps` steps of `seconds` together; `kv_blocks` is the
    largest number in use.
    """

    start: float
    steps: int
    seconds: float
    tokens: int
    prefill: int
    kv_blocks: int

    def merged(self, other: Point) -> Point:
        """Return the sum of both, which starts where this one does."""
        return Point(
            self.start,
            self.steps + other.steps,
            self.seconds + other.seconds,
            self.tokens + other.tokens,
            self.prefill + other.prefill,
            max(self.kv_blocks, other.kv_blocks),
        )


class Tally:
    """Sums over steps, and (unless `series` is false) a time series from `origin` (seconds) on."""

    def __init__(self, origin: float, *, series: bool = True) -> None:
        self.steps = 0
        self.seconds = 0.0  # in which a step ran
        self.busy = 0.0  # seconds × sequences computed
        self.kv_time = 0.0  # seconds × blocks in use
        self.kv_peak = 0
        self._origin = origin
        self._keeps_series = series
        self._interval = _FINEST
        self._points: dict[int, Point] = {}  # by the number of their interval
        self._number = -1  # of the interval that is open
        self._open = [0, 0.0, 0, 0, 0]  # the fields of its point but for the start

    def step(self, end: float, duration: float, sequences: int, tokens: int, prefill: int, kv_blocks: int) -> None:
        """Count a step that ended at `end`, computed `sequences` and generated `tokens`."""
        self.steps += 1
        self.seconds += duration
        self.busy += sequences * duration
        self.kv_time += kv_blocks * duration
        if kv_blocks > self.kv_peak:  # a call of max() would cost as much as the rest of the line
            self.kv_peak = kv_blocks
        if not self._keeps_series:
            return
        number = int((end - self._origin) / self._interval)
        if number != self._number:
            self._close()
            self._number = int((end - self._origin) / self._interval)
        point = self._open
        point[0] += 1
        point[1] += duration
        point[2] += tokens
        point[3] += prefill
        if kv_blocks > point[4]:
            point[4] = kv_blocks

    def series(self) -> tuple[Point, ...]:
        """Return the points so far, oldest first; intervals in which no step ended have none."""
        self._close()
        return tuple(self._points.values())

    def _close(self) -> None:
        """Put the open interval's point into the series; make the intervals longer if there are too many."""
        if self._open[0]:
            steps, seconds, tokens, prefill, kv_blocks = self._open
            self._put(self._number, int(steps), seconds, int(tokens), int(prefill), int(kv_blocks))
            self._open = [0, 0.0, 0, 0, 0]
        while len(self._points) > _POINTS:
            self._interval *= 2
            points, self._points = self._points, {}
            for number, point in points.items():
                self._put(number // 2, point.steps, point.seconds, point.tokens, point.prefill, point.kv_blocks)

    def _put(self, number: int, steps: int, seconds: float, tokens: int, prefill: int, kv_blocks: int) -> None:
        point = Point(self._origin + number * self._interval, steps, seconds, tokens, prefill, kv_blocks)
        before = self._points.get(number)
        self._points[number] = point if before is None else before.merged(point)
