"""What a replay gave: one outcome per request, and how well the slots were used."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_core.causes import Breakdown
from paceline_core.request import Ended, FinishReason
from paceline_sim.tally import Point

__all__ = ["Outcome", "Result"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request fared; times are seconds from the trace's start.

    `released` is when its result and slot were given back. None for `started` and the token times means: never.
    """

    index: int
    arrival: float
    prompt_len: int
    output_len: int
    reason: FinishReason
    started: float | None
    first_token: float | None
    last_token: float | None
    released: float
    preemptions: int
    cached_len: int
    parts: Breakdown

    @property
    def latency(self) -> float:
        """From arrival until the result is given back."""
        return self.released - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None where there is none."""
        if self.first_token is None or self.last_token is None or self.output_len < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_len - 1)

    @property
    def queued(self) -> float:
        """Seconds from arrival until the first step that computed it."""
        return (self.released if self.started is None else self.started) - self.arrival

    @classmethod
    def of(cls, ended: Ended, parts: Breakdown) -> Outcome:
        """Return the outcome that the scheduler's record tells, with where the time went."""
        return cls(
            index=ended.request.seq_id,
            arrival=ended.request.arrival,
            prompt_len=ended.request.prompt_len,
            output_len=ended.output_len,
            reason=ended.reason,
            started=ended.first_scheduled,
            first_token=ended.first_token,
            last_token=ended.last_token,
            released=ended.released,
            preemptions=ended.preemptions,
            cached_len=ended.cached_len,
            parts=parts,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A whole replay: `outcomes` in the order of the trace, `duration` (seconds from the first arrival to the last release),
    `steps` that ran and the seconds that they took (`computing`), `slots` (maxNumSeqs), `busy` (seconds of slots in which a
    sequence was computed), `kv_blocks` of the pool, the most in use (`kv_peak`) and their sum over time (`kv_time`, blocks ×
    seconds of steps), `preemptions`, and a time `series`.
    """

    outcomes: tuple[Outcome, ...]
    duration: float
    steps: int
    slots: int
    busy: float
    computing: float
    kv_blocks: int
    kv_peak: int
    kv_time: float
    preemptions: int
    series: tuple[Point, ...]

    @property
    def slot_utilisation(self) -> float:
        """The share of all slot time in which a sequence was computed: 0 to 1."""
        return self.busy / (self.slots * self.duration)

    @property
    def latencies(self) -> tuple[float, ...]:
        """The latency of each request, in the order of the trace."""
        return tuple(outcome.latency for outcome in self.outcomes)

    @property
    def mean_latency(self) -> float:
        """The mean of `latencies`."""
        return sum(self.latencies) / len(self.outcomes)
