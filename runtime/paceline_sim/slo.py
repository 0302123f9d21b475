"""Latency objectives, and which requests met them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_core.durations import format_duration, parse_duration
from paceline_core.errors import FormatError
from paceline_sim.result import Outcome

__all__ = ["Slo"]

_EXAMPLE = "as in ttft=500ms,tpot=50ms,percentile=95"


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds; None: any time is fine. `percentile` of the requests must meet all of them."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    percentile: float = 95.0

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft=500ms,tpot=50ms,e2e=10s,percentile=95`, of which any part may be left out.

        Raises `FormatError` that names the part.
        """
        values: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in cls.__dataclass_fields__:
                raise FormatError(
                    f"SLO part {part.strip()!r}: expected ttft, tpot, e2e or percentile and a value, {_EXAMPLE}"
                )
            if name in values:
                raise FormatError(f"SLO: {name} is given twice")
            values[name] = _percentile(value) if name == "percentile" else _objective(name, value)
        return cls(**values)

    def met(self, outcome: Outcome) -> bool:
        """Return whether the request was served within the objectives. A refused or aborted one never is."""
        if outcome.ttft is None or outcome.reason not in ("stop", "length"):
            return False
        times = ((self.ttft, outcome.ttft), (self.tpot, outcome.tpot), (self.e2e, outcome.latency))
        return all(bound is None or seconds is None or seconds <= bound for bound, seconds in times)

    @property
    def is_set(self) -> bool:
        """Whether there is any objective."""
        return (self.ttft, self.tpot, self.e2e) != (None, None, None)

    def __str__(self) -> str:
        parts = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        texts = [f"{name} ≤ {format_duration(seconds)}" for name, seconds in parts if seconds is not None]
        return f"{', '.join(texts)} for {self.percentile:g} % of the requests" if texts else "none"


def _objective(name: str, text: str) -> float:
    try:
        seconds = parse_duration(text)
    except FormatError as error:
        raise FormatError(f"SLO {name}: {error}") from None
    if not 0 < seconds < float("inf"):
        raise FormatError(f"SLO {name}: {text} is no objective, expected a time above 0, {_EXAMPLE}")
    return seconds


def _percentile(text: str) -> float:
    try:
        value = float(text.removesuffix("%").removeprefix("p"))
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise FormatError(f"SLO percentile: {text!r} is no percentile, expected a number above 0 and at most 100")
    return value
