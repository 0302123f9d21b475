"""Rotation of a service's admin token on request: the old one is accepted beside the new one for a while. Pure.

Tokens are derived from a salt, so what has to be remembered is only which salts count. That stands in an annotation of the
Deployment. Pods see a changed Secret within a minute or two (kubelets refresh mounts so often), so the operator calls with
the old token until the overlap is over: pods with the new file take it too, and pods without it know no other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline_operator.names import TOKENS

__all__ = ["OVERLAP", "Salts", "salts_of"]

OVERLAP = 600  # seconds: five times what kubelets take by default to refresh a mount, and room for one that is restarted


@dataclass(frozen=True, slots=True)
class Salts:
    """Which salts count: the current one, and until `until` (Unix seconds) the one before."""

    current: str = ""
    previous: str | None = None
    until: int = 0

    @property
    def accepted(self) -> tuple[str, ...]:
        """Those whose tokens pods accept, the newest first."""
        return (self.current,) if self.previous is None else (self.current, self.previous)

    @property
    def calling(self) -> str:
        """The one whose token the operator calls with."""
        return self.accepted[-1]

    def notes(self) -> dict[str, str]:
        """Return the Deployment's annotation; none for a token that was never rotated."""
        if self == Salts():
            return {}
        data = {"current": self.current, "previous": self.previous, "until": self.until}
        return {TOKENS: json.dumps(data, sort_keys=True)}


def salts_of(recorded: str | None, wanted: str, now: float) -> Salts:
    """Return the salts that count at `now` for a service whose annotation asks for `wanted`.

    `recorded` is the Deployment's annotation: "" if it has none, None if there is no Deployment, so no pod either.
    """
    if recorded is None:
        return Salts(wanted)
    known = _read(recorded)
    if known.current != wanted:
        return Salts(wanted, known.current, int(now) + OVERLAP)
    return Salts(wanted) if known.previous is not None and now >= known.until else known


def _read(text: str) -> Salts:
    """Return the salts in an annotation; one that somebody has spoilt counts as never rotated."""
    try:
        data = json.loads(text) if text else {}
        previous = data.get("previous")
        return Salts(str(data.get("current", "")), None if previous is None else str(previous), int(data.get("until", 0)))
    except (ValueError, TypeError, AttributeError):
        return Salts()
