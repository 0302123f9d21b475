"""Who changes a child back each time we set it right? Without patience the two of us would write for ever. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_operator.names import FIELD_MANAGER

__all__ = ["Contest", "Contests", "last_writer"]

_PATIENCE = 3  # corrections at once: two people and a script may well edit one object within minutes
_LONGEST = 300.0  # seconds between two corrections, however long it goes on
_CALM = 600.0  # seconds without a correction after which it counts as over


@dataclass(frozen=True, slots=True)
class Contest:
    """One child that was set right `count` times; the last time at `since`, about the field `path`."""

    count: int
    since: float
    path: str
    writer: str = ""

    @property
    def open(self) -> bool:
        """Whether somebody does it again and again."""
        return self.count > _PATIENCE

    @property
    def due(self) -> float:
        """When it may be set right once more."""
        return self.since + (min(2.0 ** (self.count - _PATIENCE), _LONGEST) if self.open else 0.0)

    @property
    def over(self) -> float:
        """When it is forgotten if nothing happens."""
        return self.since + _CALM


class Contests:
    """The children of all services that others have changed lately. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Contest] = {}

    def get(self, child: Hashable, now: float) -> Contest | None:
        """Return what is known of `child`; what is over is forgotten."""
        found = self._known.get(child)
        if found is not None and now >= found.over:
            del self._known[child]
            return None
        return found

    def corrected(self, child: Hashable, path: str, writer: str, now: float) -> Contest:
        """Note that `child` is set right now."""
        before = self.get(child, now)
        contest = Contest((before.count if before else 0) + 1, now, path, writer or (before.writer if before else ""))
        self._known[child] = contest
        return contest

    def forget(self, child: Hashable) -> None:
        """Forget a child that is gone."""
        self._known.pop(child, None)


def last_writer(live: Mapping[str, Any]) -> str:
    """Return the field manager that wrote last to an object besides us and those who write its status ("": nobody)."""
    entries = [e for e in live.get("metadata", {}).get("managedFields") or [] if e.get("manager") != FIELD_MANAGER]
    about_spec = [entry for entry in entries if "f:spec" in (entry.get("fieldsV1") or {})]
    others = about_spec or [entry for entry in entries if "f:status" not in (entry.get("fieldsV1") or {})]
    if not others:
        return ""
    return str(max(others, key=lambda entry: str(entry.get("time") or "")).get("manager", ""))
