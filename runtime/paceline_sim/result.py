"""What a replay gave: one outcome per request, and how well the slots were used."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_core.request import Ended, FinishReason

__all__ = ["Outcome", "Result"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request fared; times are seconds from the trace's start.

    `released` is when its result and slot were given back. None for `started` and the token times means: never.
    """

    index: int
    arrival: float
    output_len: int
    reason: FinishReason
    started: float | None
    first_token: float | None
    last_token: float | None
    released: float
    preemptions: int

    @property
    def latency(self) -> float:
        """From arrival until the result is given back."""
        return self.released - self.arrival

    @classmethod
    def of(cls, ended: Ended) -> Outcome:
        """Return the outcome that the scheduler's record tells."""
        return cls(
            index=ended.request.seq_id,
            arrival=ended.request.arrival,
            output_len=ended.output_len,
            reason=ended.reason,
            started=ended.first_scheduled,
            first_token=ended.first_token,
            last_token=ended.last_token,
            released=ended.released,
            preemptions=ended.preemptions,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A whole replay: `outcomes` in the order of the trace, `duration` (seconds from the first arrival to the last release),
    `steps` that ran, `slots` (maxNumSeqs), and `busy` (seconds of slots in which a sequence was computed).
    """

    outcomes: tuple[Outcome, ...]
    duration: float
    steps: int
    slots: int
    busy: float

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
