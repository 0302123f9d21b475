"""From what pods told to what the twin replays: some pods' own traffic. Pure.

`samples_of` are for checking the twin: few requests under the knobs in force, with what was there when the window began.
`traffic_of` is for choosing knobs: as many requests as tell what traffic is like, under whatever knobs they came.
What was refused before it was read is in neither: nobody knows how long it would have been.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.lengths import LengthCurve, read
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.question import Sample, SeenRequest
from paceline_operator.tuning.view import tpot

__all__ = ["sample_of", "samples_of", "traffic_of"]

_MOST_PODS = 3  # the twin is asked about so many pods' traffic: more would tell little, and cost as much again
_MOST_REQUESTS = 160  # of all samples together that count: they tell a share to within 4 in a hundred
# Of all pods' traffic together: a share of them within the objective is told to within 2 in a hundred. Where requests come
# fast those of the last minutes, or there may be no burst among them; no more than a decision can replay in some seconds
_MOST_TRAFFIC, _MOST_LATELY = 480, 1440
_MOST_COMPARED = 1000  # requests of a pod that is compared with another: more than a trial needs
_FEWEST = 10  # requests of a pod that are worth a replay
_HASH_BLOCKS = 4  # blocks per prefix hash that a ledger keeps


def samples_of(
    pods: Sequence[PodLedger], objective: Objective, *, since: float, now: float, epochs: dict[str, int], block_size: int
) -> tuple[Sample, ...]:
    """Return the samples of up to three pods, the busiest first, of requests from `since` on.

    `epochs` gives the knob epoch that counts, by pod. A request without a known length (refused, still running) gets one
    that the others make likely.
    """
    curve = _curve(pods, since)
    ranked = _busiest(pods, since)
    share = _MOST_REQUESTS // max(1, len(ranked))
    found = (
        _window(pod, objective, since, now, epochs.get(pod.name), curve, block_size, share).sample(pod, share)
        for pod in ranked
    )
    return tuple(sample for sample in found if sum(row.counted for row in sample) >= _FEWEST)


def sample_of(pod: PodLedger, objective: Objective, *, since: float, now: float, block_size: int) -> tuple[float, Sample]:
    """Return the time from which arrivals are counted, and all that a pod got from `since` on, with what was there then."""
    window = _window(pod, objective, since, now, None, _curve([pod], since), block_size, _MOST_COMPARED)
    return window.start, window.sample(pod, _MOST_COMPARED)


def traffic_of(pods: Sequence[PodLedger], *, since: float, lately: float, block_size: int) -> tuple[Sample, ...]:
    """Return who came from `since` on, the newest, and not how they fared: of the busiest pod, if that isn't much of others.

    One pod's traffic of ten minutes tells more than two pods' of five: a queue that never ends takes its time to show. All
    that came from `lately` on are of interest.
    """
    curve, found, busiest = _curve(pods, since), [], _busiest(pods, since)
    newer = _count(busiest[0], max(since, lately)) if busiest else 0
    left = min(_MOST_LATELY, max(_MOST_TRAFFIC, newer))
    for pod in busiest:
        newest = sorted((r for r in read(pod.records) if r.arrival >= since), key=lambda r: r.arrival)[-left:]
        rows = (
            SeenRequest(
                arrival=r.arrival - newest[0].arrival,
                prompt=r.prompt_tokens,
                output=_length(r, curve, number),
                priority=r.priority,
                hashes=r.prefix_hashes,
                hash_tokens=_HASH_BLOCKS * block_size if r.prefix_hashes else 0,
            )
            for number, r in enumerate(newest)
        )
        found.append(tuple(row for row in rows if row.output > 0))
        left -= len(newest)
        if left < _FEWEST:
            break
    return tuple(sample for sample in found if len(sample) >= _FEWEST)


def _busiest(pods: Sequence[PodLedger], since: float) -> list[PodLedger]:
    return sorted(pods, key=lambda pod: (-_count(pod, since), pod.name))[:_MOST_PODS]


def _curve(pods: Iterable[PodLedger], since: float) -> LengthCurve:
    """Return how long requests become, told by those since then if enough of them have ended."""
    records = [r for pod in pods for r in pod.records]
    newer = [r for r in records if r.arrival >= since]
    if sum(r.outcome == "finished" for r in newer) >= _FEWEST:
        records = newer
    ended = (r.output_tokens for r in records if r.outcome == "finished")
    return LengthCurve(ended, (r.output_tokens for r in records if r.outcome == "unfinished"))


def _count(pod: PodLedger, since: float) -> int:
    return sum(r.arrival >= since for r in read(pod.records))


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
    curve: LengthCurve
    block_size: int

    def sample(self, pod: PodLedger, most: int) -> Sample:
        """Return at most `most` requests that were there at the start, and all that came since."""
        ordered = sorted(read(pod.records), key=lambda r: r.arrival)
        left = [r for r in ordered if r.arrival < self.start and (r.outcome == "unfinished" or (r.end or 0.0) > self.start)]
        came = [r for r in ordered if r.arrival >= self.start]
        rows = [*itertools.starmap(self._left_over, enumerate(left)), *itertools.starmap(self._seen, enumerate(came))]
        whole = [row for row in rows if row.output > 0]
        queued = sum(row.arrival <= 0 for row in whole)
        return tuple(whole[: min(queued, most)] + whole[queued:])

    def _seen(self, number: int, r: RequestRecord) -> SeenRequest:
        margin = self.objective.margin(r, self.now)
        return SeenRequest(
            arrival=r.arrival - self.start,
            prompt=r.prompt_tokens,
            output=_length(r, self.curve, number),
            priority=r.priority,
            hashes=r.prefix_hashes,
            hash_tokens=_HASH_BLOCKS * self.block_size if r.prefix_hashes else 0,
            ttft=None if r.first_token is None else r.first_token - r.arrival,
            tpot=tpot(r),
            counted=r.arrival >= self.since and self.epoch in (None, r.epoch),
            met=None if margin is None else margin >= 0 and r.outcome != "refused",
        )

    def _left_over(self, number: int, r: RequestRecord) -> SeenRequest:
        """Return what was left of a request at the start: what it had generated is part of its context, as its prompt is."""
        output, share = _length(r, self.curve, number), 0.0
        if r.first_token is not None and r.first_token < self.start:
            last = r.end if r.end is not None else self.now
            share = (self.start - r.first_token) / max(last - r.first_token, 1e-9)
        done = round(share * (r.output_tokens if r.end is None else output))
        return SeenRequest(0.0, r.prompt_tokens + done, max(0, output - done), r.priority, counted=False)


def _window(
    pod: PodLedger, objective: Objective, since: float, now: float, epoch: int | None, curve: LengthCurve,
    block_size: int, most: int,
) -> _Window:  # fmt: skip
    """Return a window of at most `most` arrivals that count, and as many before them that bring the queue about.

    It begins when fewest requests were there: the twin has to compute their prompts again, which the pod had done.
    """
    records = read(pod.records)
    own = sorted(r.arrival for r in records if epoch in (None, r.epoch))
    recent = [arrival for arrival in own if arrival >= since][-most:]
    since = recent[0] if recent else now
    before = [arrival for arrival in own if arrival <= since][-most:]
    start = min(reversed(before), key=_crowd(records), default=since)
    return _Window(objective, start, since, now, epoch, curve, block_size)


def _crowd(rows: Sequence[RequestRecord]) -> Callable[[float], int]:
    """Return what tells how many requests were there at a moment."""
    arrivals, ends = sorted(r.arrival for r in rows), sorted(r.end for r in rows if r.end is not None)
    return lambda at: bisect_left(arrivals, at) - bisect_right(ends, at)


def _length(r: RequestRecord, curve: LengthCurve, number: int) -> int:
    """Return the output length: as it was, or as it may become."""
    if r.outcome == "finished" or (r.outcome == "aborted" and r.output_tokens):
        return r.output_tokens
    likely = curve.guess(r.output_tokens, number)
    return min(likely, r.max_tokens) if r.max_tokens else likely
