"""What is replayed: requests with their arrival times and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline_core.errors import FormatError
from paceline_core.request import Request

__all__ = ["Trace", "TraceRequest"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: arrival (seconds from the trace's start), lengths in tokens, priority, and shared prefix blocks.

    `output_len` is the length that was generated; in the replay the request stops there. `prefix_hashes` are the hashes of
    pieces of `hash_tokens` tokens of the prompt (0: of the engine's blocks): prompts whose hashes begin alike share KV.
    """

    arrival: float
    prompt_len: int
    output_len: int
    priority: int = 0
    prefix_hashes: tuple[int, ...] = ()
    hash_tokens: int = 0

    def at(self, arrival: float) -> TraceRequest:
        """Return the same request, arriving at `arrival`."""
        return replace(self, arrival=arrival)

    def to_request(self, seq_id: int, block_size: int) -> Request:
        """Return what a scheduler with blocks of `block_size` tokens is given."""
        return Request(
            seq_id=seq_id,
            prompt_len=self.prompt_len,
            max_tokens=self.output_len,
            arrival=self.arrival,
            priority=self.priority,
            prefix_hashes=self._block_hashes(block_size),
        )

    def _block_hashes(self, block_size: int) -> tuple[int, ...]:
        """Return a hash per full block: of the piece that its last token is in, and the place of that token in the piece."""
        width = self.hash_tokens
        if not width:
            return self.prefix_hashes
        known = min(self.prompt_len, len(self.prefix_hashes) * width)
        lasts = range(block_size - 1, known, block_size)
        return tuple(self.prefix_hashes[last // width] * width + last % width for last in lasts)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. `left_out` counts records that told too little to replay them.

    Raises `FormatError` that names the request if it is none.
    """

    requests: tuple[TraceRequest, ...]
    left_out: int = 0

    def __post_init__(self) -> None:
        if not self.requests:
            raise FormatError("the trace has no request")
        before = 0.0
        for row, request in enumerate(self.requests, start=1):
            if request.arrival < before:
                raise FormatError(f"request {row} arrives at {request.arrival:g}, earlier than {before:g}")
            if request.prompt_len < 1 or request.output_len < 1:
                lengths = f"{request.prompt_len} prompt and {request.output_len} output tokens"
                raise FormatError(f"request {row} has {lengths}, at least 1 of each is needed")
            before = request.arrival

    @property
    def span(self) -> float:
        """Seconds between the first and the last arrival."""
        return self.requests[-1].arrival - self.requests[0].arrival

    @property
    def rate(self) -> float:
        """Requests per second; infinite if they all come at once."""
        return (len(self.requests) - 1) / self.span if self.span else math.inf

    def scaled(self, load: float) -> Trace:
        """Return the same requests at `load` times the rate. Raises `FormatError` for a load that isn't above 0."""
        if not 0 < load < math.inf:
            raise FormatError(f"load is {load:g}, expected a factor above 0, as in 1.5")
        return replace(self, requests=tuple(request.at(request.arrival / load) for request in self.requests))

    def window(self, start: float, length: float) -> Trace:
        """Return who arrives within `length` seconds from `start` on, counted from the first arrival.

        Raises `FormatError` if nobody does.
        """
        low = self.requests[0].arrival + start
        inside = tuple(r.at(r.arrival - low) for r in self.requests if low <= r.arrival < low + length)
        if not inside:
            until = "its end" if math.isinf(length) else f"{start + length:g} s"
            raise FormatError(f"no request arrives from {start:g} s to {until}: the trace is {self.span:.0f} s long")
        return replace(self, requests=inside)

    @classmethod
    def regular(cls, output_lens: Sequence[int], *, every: float, prompt_len: int = 1) -> Trace:
        """Return requests of these output lengths, one each `every` seconds (0: all at once)."""
        return cls(tuple(TraceRequest(i * every, prompt_len, length) for i, length in enumerate(output_lens)))
