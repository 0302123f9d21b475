"""Typed errors of the scheduling core.

```
PacelineError
├── KnobError            a knob value that can't be used (carries every violation)
├── RevisionConflict     a knob change that lost a race (stale revision or fencing number)
├── RequestRefused       a request that the scheduler will never run, with the reason
└── FormatError          text or JSON that doesn't follow its format (durations, wire documents)
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FormatError", "KnobError", "KnobViolation", "PacelineError", "RequestRefused", "RevisionConflict"]


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


@dataclass(frozen=True, slots=True)
class KnobViolation:
    """One knob value that breaks one rule.

    `field` is the wire name (`maxNumSeqs`), `value` what was given, `bound` the rule in words (`1 ≤ value ≤ 256`),
    `remedy` what to do about it.
    """

    field: str
    value: Any
    bound: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} breaks {self.bound}: {self.remedy}"


class KnobError(PacelineError):
    """One or more knob values can't be used. Nothing of the change was applied."""

    def __init__(self, violations: tuple[KnobViolation, ...]) -> None:
        assert violations, "a KnobError names at least one violation"
        super().__init__("; ".join(str(v) for v in violations))
        self.violations = violations

    def __reduce__(self) -> tuple[Any, ...]:
        return KnobError, (self.violations,)  # errors cross process boundaries: by default pickle repeats the message


class RevisionConflict(PacelineError):
    """Somebody else changed the knobs first, or a newer leader did."""

    def __init__(self, message: str, *, current_revision: int) -> None:
        super().__init__(message)
        self.current_revision = current_revision


class RequestRefused(PacelineError):
    """The request can never run here. `reason` is a stable word for metrics, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestRefused, (self.reason, str(self))


class FormatError(PacelineError):
    """A text that doesn't follow its format; the message quotes it and shows a right one."""
