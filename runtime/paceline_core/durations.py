"""Durations as people write them in manifests and flags (`50ms`, `1.5s`, `2m`), and seconds as code uses them."""

from __future__ import annotations

import math
import re

from paceline_core.errors import FormatError

__all__ = ["format_duration", "parse_duration"]

_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|µs|ms|s|m|h)")
_WHOLE = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:us|µs|ms|s|m|h))+")
_MAX_LENGTH = 32


def parse_duration(text: str) -> float:
    """Return seconds for a Go-style duration (`50ms`, `1m30s`) to the microsecond, as far as it can be written down again;
    `never` is infinite.

    Raises `FormatError` for anything else, also for a bare number: a number without a unit is a guess.
    """
    if text == "never":
        return math.inf
    if not isinstance(text, str) or len(text) > _MAX_LENGTH or not _WHOLE.fullmatch(text):
        raise FormatError(f"{text!r} is not a duration: write a number and a unit, as in '50ms', '1.5s' or '2m'")
    return round(sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)), 6)


def format_duration(seconds: float) -> str:
    """Return the shortest exact text that `parse_duration` reads back: `0.05` → `50ms`."""
    if math.isinf(seconds):
        return "never"
    for unit, scale in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= scale and seconds % scale == 0:
            return f"{int(seconds // scale)}{unit}"
    # rounded to a microsecond: finer than any knob means, and free of 0.05 * 1000 = 50.00000000000001
    micros = round(seconds * 1e6)
    if micros % 1000 == 0:
        return f"{micros // 1000}ms"
    return f"{micros}us"
