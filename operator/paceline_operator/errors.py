"""Typed errors of the operator.

```
PacelineError
├── SpecError          an InferenceService that can't be rendered (carries every problem)
├── SettingsError      an environment that the operator can't start with
├── ForeignObject      a child of our name belongs to somebody else; we never take it
├── LeaseError         the Lease of the leader is refused to us, or was lost to another replica
├── WatchEnded         the API server ends a watch for good: the process ends and is started again
├── ApiRefused         the API server refuses what we send (invalid, forbidden, quota): retrying alone won't help
├── ApiUnavailable     the API server can't be reached or asks to come back later: retried
└── AdminError         a pod's admin port didn't do what was asked
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline_core.errors import PacelineError

__all__ = [
    "AdminError",
    "ApiRefused",
    "ApiUnavailable",
    "ForeignObject",
    "LeaseError",
    "Problem",
    "SettingsError",
    "SpecError",
    "WatchEnded",
]

_SHOWN = 60  # characters of a bad value that a message quotes


@dataclass(frozen=True, slots=True)
class Problem:
    """One field that can't be used: its path, the value given, the rule it breaks and what to do about it."""

    field: str
    value: Any
    bound: str
    remedy: str

    def __str__(self) -> str:
        text = repr(self.value)
        shown = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
        return f"{self.field}: {shown} ({self.bound}): {self.remedy}"


class SpecError(PacelineError):
    """One or more fields of an InferenceService can't be used; nothing of it is applied. `reason` is the condition's."""

    def __init__(self, problems: tuple[Problem, ...], *, reason: str = "Invalid") -> None:
        assert problems, "a SpecError names at least one problem"
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems
        self.reason = reason


class SettingsError(PacelineError):
    """An environment variable that is missing or can't be used."""


class ForeignObject(PacelineError):
    """An object of a child's name exists and isn't ours. `reason` is the condition's: a name that is taken, or one that the
    cluster is about to free."""

    def __init__(self, message: str, *, reason: str = "NameTaken") -> None:
        super().__init__(message)
        self.reason = reason


class LeaseError(PacelineError):
    """This process can't become the leader, or isn't it any more."""


class WatchEnded(PacelineError):
    """What is watched isn't served any more, or not to us."""


class ApiRefused(PacelineError):
    """The API server refuses a request for a reason that a retry doesn't remove. `status` is the HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiUnavailable(PacelineError):
    """The API server can't be reached, is overloaded or lost a race; `retry_after` is its own hint in seconds."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AdminError(PacelineError):
    """A pod's admin port can't be reached or refuses a change. `status` is the HTTP code, 0 if there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
