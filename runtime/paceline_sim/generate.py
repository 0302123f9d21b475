"""Makes traffic where none was recorded: arrivals that are random or come in bursts, lengths of given percentiles.

The same seed gives the same trace on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from paceline_core.errors import FormatError
from paceline_sim.trace import Trace, TraceRequest

__all__ = ["Lengths", "Prefixes", "bursty", "poisson"]

_MOST_REQUESTS = 5_000_000  # beyond it a slip of the pen would take the machine's memory before anything is said


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens with the given percentiles, as in `{50: 400, 95: 1500, 100: 4000}`.

    Between two percentiles lengths are spread evenly; below the lowest they begin at `least`. Raises `FormatError` for
    percentiles outside (0, 100], without a 100th, or lengths that fall.
    """

    percentiles: Mapping[float, int]
    least: int = 1

    def __post_init__(self) -> None:
        points = sorted(self.percentiles.items())
        if not points or points[0][0] <= 0 or points[-1][0] != 100:
            raise FormatError("lengths need percentiles above 0 and the 100th, as in 50=400,100=4000")
        lengths = [self.least, *(length for _, length in points)]
        if lengths[0] < 1 or lengths != sorted(lengths):
            raise FormatError(f"lengths must grow with the percentile, from at least 1 token: got {lengths}")

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        rank, low_rank, low = rng.random() * 100, 0.0, self.least
        for high_rank, high in sorted(self.percentiles.items()):
            if rank <= high_rank:
                return round(low + (high - low) * (rank - low_rank) / (high_rank - low_rank))
            low_rank, low = high_rank, high
        raise AssertionError("the 100th percentile is the last")


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prompts that begin alike: each is one of `groups`, whose members share the first `tokens` tokens."""

    groups: int
    tokens: int
    piece: int = 16

    def hashes(self, rng: random.Random) -> tuple[int, ...]:
        """Return the hashes of a shared prefix, one per `piece` tokens."""
        group = rng.randrange(self.groups)
        return tuple((group << 32) + index for index in range(self.tokens // self.piece))


def poisson(
    rate: float, duration: float, prompts: Lengths, outputs: Lengths, *, prefixes: Prefixes | None = None, seed: int = 0
) -> Trace:
    """Return independent arrivals: `rate` requests per second for `duration` seconds."""
    return bursty(rate, duration, prompts, outputs, burst=1.0, every=duration, prefixes=prefixes, seed=seed)


def bursty(
    rate: float, duration: float, prompts: Lengths, outputs: Lengths, *, burst: float, every: float,
    share: float = 0.1, prefixes: Prefixes | None = None, seed: int = 0,
) -> Trace:  # fmt: skip
    """Return arrivals that come `burst` times faster for the first `share` of every `every` seconds, `rate` on average.

    Raises `FormatError` for a rate or time that isn't above 0, a burst below 1, or one that leaves less than nothing for
    the time between bursts, and for more requests than a replay can hold.
    """
    if not (rate > 0 and duration > 0 and every > 0):
        raise FormatError(f"rate {rate:g}, duration {duration:g} and every {every:g} must all be above 0")
    if not (0 < share < 1 and 1 <= burst <= 1 / share):
        raise FormatError(f"bursts of {burst:g} times the rate in {share:g} of the time: expected 1 ≤ burst ≤ {1 / share:g}")
    if rate * duration > _MOST_REQUESTS:
        made = f"rate {rate:g} for {duration:g} s makes {rate * duration:.3g} requests"
        raise FormatError(f"{made}, more than {_MOST_REQUESTS:,}: lower the rate or the duration")
    rng = random.Random(seed)  # noqa: S311  # traffic, not secrets
    calm = (1 - share * burst) / (1 - share)
    requests, now = [], rng.expovariate(rate * burst)
    while now < duration:
        # thinning: candidates come at the rate of a burst, and between bursts only some of them are kept
        if rng.random() * burst < (burst if now % every < share * every else calm):
            requests.append(_request(rng, now, prompts, outputs, prefixes))
        now += rng.expovariate(rate * burst)
    return Trace(tuple(requests))


def _request(
    rng: random.Random, arrival: float, prompts: Lengths, outputs: Lengths, prefixes: Prefixes | None
) -> TraceRequest:
    own, output_len = prompts.draw(rng), outputs.draw(rng)
    if prefixes is None:
        return TraceRequest(arrival, own, output_len)
    hashes = prefixes.hashes(rng)
    return TraceRequest(arrival, prefixes.tokens + own, output_len, prefix_hashes=hashes, hash_tokens=prefixes.piece)
