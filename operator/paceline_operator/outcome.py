"""What came of applying the children of one service, as the status tells it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Applied", "Fetch", "FetchState", "Trouble"]

Trouble = tuple[str, str]  # reason in one word, message


class FetchState(StrEnum):
    """How far the Job is that fetches a model into the cache."""

    FETCHING = "Fetching"
    READY = "Ready"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Fetch:
    """How far a model is on its way into the cache. `done` and `total` are bytes, None where nobody has told yet."""

    state: FetchState
    message: str = ""
    done: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome for one service: `failure` keeps the pods from being as they should be, `troubles` are about children that
    they can do without. `waiting` says that a change of the class waits for its turn. `held` is what an upgrade of the
    operator would change in the pods, `missing` the kinds that the server lacks, `contested` the children that somebody else
    keeps changing, in words. `restart_hash` is that of new pods; `again` the seconds until it is worth a look by itself."""

    restart_hash: str = ""
    failure: Trouble | None = None
    troubles: tuple[Trouble, ...] = ()
    held: str = ""
    waiting: bool = False
    missing: tuple[str, ...] = ()
    contested: tuple[str, ...] = ()
    again: float | None = None
    salt: str = ""  # of the admin token to call with
    fetch: Fetch | None = None
