"""From what pods told to what the twin replays: some pods' own traffic, with what was there when the window began. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.question import Sample, SeenRequest
from paceline_operator.tuning.view import tpot

__all__ = ["samples_of"]

_MOST_PODS = 3  # the twin is asked about so many pods' traffic: more would tell little, and cost as much again
_MOST_REQUESTS = 240  # of all samples together: a replay of it takes a few tenths of a second
_FEWEST = 10  # requests of a pod that are worth a replay
_HASH_BLOCKS = 4  # blocks per prefix hash that a ledger keeps


def samples_of(
    pods: Sequence[PodLedger], objective: Objective, *, since: float, now: float, epochs: dict[str, int], block_size: int
) -> tuple[Sample, ...]:
    """Return the samples of up to three pods, the busiest first, of requests from `since` on.

    `epochs` gives the knob epoch that counts, by pod. A request without a known length (refused, still running) gets the
    length that a finished one of at least its length so far would have.
    """
    finished = sorted(r.output_tokens for pod in pods for r in pod.records if r.outcome == "finished")
    ranked = sorted(pods, key=lambda pod: (-_count(pod, since), pod.name))[:_MOST_PODS]
    share = _MOST_REQUESTS // max(1, len(ranked))
    found = (
        _window(pod, objective, since, now, epochs.get(pod.name), finished, block_size, share).sample(pod, share)
        for pod in ranked
    )
    return tuple(sample for sample in found if sum(row.counted for row in sample) >= _FEWEST)


def _count(pod: PodLedger, since: float) -> int:
    return sum(r.arrival >= since for r in pod.records)


@dataclass(frozen=True, slots=True)
class _Window:
    """What a pod's records are seen through: who came from `since` on counts; the replay begins at `start`, so that a queue
    that was there then is there in the twin too.
    """

    objective: Objective
    start: float
    since: float
    now: float
    epoch: int | None
    finished: Sequence[int]
    block_size: int

    def sample(self, pod: PodLedger, most: int) -> Sample:
        """Return at most `most` requests that were there at the start, and all that came since."""
        ordered = sorted(pod.records, key=lambda r: r.arrival)
        left = [r for r in ordered if r.arrival < self.start and (r.outcome == "unfinished" or (r.end or 0.0) > self.start)]
        rows = [*map(self._left_over, left), *(self._seen(r) for r in ordered if r.arrival >= self.start)]
        whole = [row for row in rows if row.output > 0]
        queued = sum(row.arrival <= 0 for row in whole)
        return tuple(whole[: min(queued, most)] + whole[queued:])

    def _seen(self, r: RequestRecord) -> SeenRequest:
        margin = self.objective.margin(r, self.now)
        return SeenRequest(
            arrival=r.arrival - self.start,
            prompt=r.prompt_tokens,
            output=_length(r, self.finished),
            priority=r.priority,
            hashes=r.prefix_hashes,
            hash_tokens=_HASH_BLOCKS * self.block_size if r.prefix_hashes else 0,
            ttft=None if r.first_token is None else r.first_token - r.arrival,
            tpot=tpot(r),
            counted=r.arrival >= self.since and self.epoch in (None, r.epoch),
            met=None if margin is None else margin >= 0 and r.outcome != "refused",
        )

    def _left_over(self, r: RequestRecord) -> SeenRequest:
        """Return what was left of a request at the start: what it had generated is part of its context, as its prompt is."""
        output, share = _length(r, self.finished), 0.0
        if r.first_token is not None and r.first_token < self.start:
            last = r.end if r.end is not None else self.now
            share = (self.start - r.first_token) / max(last - r.first_token, 1e-9)
        done = round(share * (r.output_tokens if r.end is None else output))
        return SeenRequest(0.0, r.prompt_tokens + done, max(0, output - done), r.priority, counted=False)


def _window(
    pod: PodLedger, objective: Objective, since: float, now: float, epoch: int | None, finished: Sequence[int],
    block_size: int, most: int,
) -> _Window:  # fmt: skip
    """Return a window of at most `most` arrivals: the newer two thirds of them count, the others bring the queue about."""
    own = sorted(r.arrival for r in pod.records if epoch in (None, r.epoch))
    begin = own[0] if own else now
    recent = [arrival for arrival in own if arrival >= since][-2 * most // 3 :]
    since = recent[0] if recent else now
    before = [arrival for arrival in own if arrival < since][-(most - len(recent)) :]
    return _Window(objective, before[0] if before else max(begin, since), since, now, epoch, finished, block_size)


def _length(r: RequestRecord, finished: Sequence[int]) -> int:
    """Return the output length: as it was, or the median of the finished ones that are longer than it is so far."""
    if r.outcome == "finished" or (r.outcome == "aborted" and r.output_tokens):
        return r.output_tokens
    low = bisect_right(finished, r.output_tokens)
    likely = finished[(low + len(finished)) // 2] if low < len(finished) else r.output_tokens
    return min(likely, r.max_tokens) if r.max_tokens else likely
