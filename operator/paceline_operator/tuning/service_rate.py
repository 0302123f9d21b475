"""How fast pods serve, told by their requests' records: what is left to compare where nobody is served in time. Pure.

Where a queue has grown far beyond the objective every request is at the worst score, under the old knobs and under better
ones alike, until the queue is gone. What differs at once is how fast it is worked off: output tokens per second. They count
when they were generated, not when their request came: so who queued under the old knobs doesn't speak against the new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from paceline_core.wire import RequestRecord

__all__ = ["QUEUED", "STARVED", "Lately", "ServiceRates", "tokens_per_batch"]

STARVED = 0.05  # mean score (0 to 1) up to which nobody is served in time: all wait nearly twice as long as they may
_FEW = 0.3  # of the requests in time over ten intervals: a queue that began two or three minutes ago, or never ends
QUEUED = 0.9  # of the requests waited too long: a queue that doesn't end between bursts
_FEWEST = 10  # requests that tell so
_INSTANT = 1e-3  # seconds: all of an answer may come at once
_PRIOR = 4.0  # weight in batches of the rate from before, as in the guard's own prior


@dataclass(frozen=True, slots=True)
class Lately:
    """The last interval's requests that can be judged, their mean score and share in time; output tokens/s of a pod.

    The rate is of up to four intervals under the same knobs: a pod with one slot serves few requests in one. `attainment` is
    the share in time of ten: a service that only a burst keeps from its objective isn't starved. `waited` is the share that
    waited too long for the first token: where only the time per token is too long, more tokens per second are no help.
    """

    requests: int = 0
    score: float = 1.0
    share: float = 1.0
    rate: float = 0.0
    attainment: float = 1.0
    waited: float = 0.0

    @property
    def starved(self) -> bool:
        """Whether a queue keeps everybody from being served in time now, and nearly everybody for some time."""
        now = self.requests >= _FEWEST and self.score < STARVED and self.rate > 0
        return now and self.attainment < _FEW and self.waited >= QUEUED


@dataclass(slots=True)
class ServiceRates:
    """Output tokens/s of a changed pod and of another in each time batch; `before` is what a pod served before the trial.

    `difference` must be asked in the order of time: the scale of each batch is told by those before it alone, so that the
    guard's bet on it stays fair.
    """

    changed: Sequence[float]
    others: Sequence[float]
    before: float
    _seen: list[float] = field(default_factory=list)

    def difference(self, batches: Sequence[int]) -> float:
        """Return (changed − others) / (changed + others) of some batches in a row, in [−1, 1]; 0 where nothing was served.

        The sum below is the mean of the batches so far, not of these: of two pods of which one serves evenly and the other
        in bursts the even one would look faster.
        """
        changed, others = (fmean(side[number] for number in batches) for side in (self.changed, self.others))
        scale = (_PRIOR * 2 * self.before + sum(self._seen)) / (_PRIOR + len(self._seen))
        self._seen.append(changed + others)
        return max(-1.0, min(1.0, (changed - others) / scale)) if scale > 0 else 0.0


def tokens_per_batch(records: Iterable[RequestRecord], *, start: float, end: float, batch: float, now: float) -> list[float]:
    """Return the output tokens of each whole batch of `batch` seconds from `start` to `end`, by requests known up to `now`.

    A request's tokens are taken to have come evenly from its first to its last.
    """
    found = [0.0] * max(0, int((end - start) // batch))
    for r in records:
        last = r.end if r.end is not None else now
        if r.first_token is None or last <= start or not found:
            continue
        last = max(last, r.first_token + _INSTANT)
        span = last - r.first_token
        first_batch = max(0, int((r.first_token - start) // batch))
        for number in range(first_batch, min(len(found), int((last - start) // batch) + 1)):
            begin = start + number * batch
            inside = min(last, begin + batch) - max(r.first_token, begin)
            found[number] += r.output_tokens * max(0.0, inside) / span
    return found
