"""A model on its way into the cache, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_operator.outcome import Fetch, FetchState
from paceline_operator.pods import Finding, is_leaving, worst

__all__ = ["cache_status", "fetch_finding"]

_GIB = 1 << 30


def fetch_finding(fetch: Fetch | None, fetchers: Sequence[Mapping[str, Any]], now: float) -> Finding | None:
    """Return what there is to say of a model that isn't in the cache yet. `fetchers` are the Job's pods."""
    if fetch is None or fetch.state is FetchState.READY:
        return None
    found = worst([pod for pod in fetchers if not is_leaving(pod)], now)
    if fetch.state is FetchState.FAILED:
        reason = found.reason if found else "FetchFailed"
        return Finding(1, reason, f"the model can't be fetched: {found.message if found else fetch.message}", crash=True)
    if found and (found.crash or found.rank <= 3):
        return Finding(found.rank, found.reason, f"the model can't be fetched: {found.message}", found.crash)
    return Finding(4, "Fetching", f"the model is being fetched into the cache{_progress(fetch)}")


def cache_status(fetch: Fetch | None) -> dict[str, Any]:
    """Return the content of status.cache, empty where nothing is fetched beforehand."""
    if fetch is None:
        return {}
    figures = {"doneBytes": fetch.done, "totalBytes": fetch.total}
    return {"cache": {"state": fetch.state.value} | {name: value for name, value in figures.items() if value is not None}}


def _progress(fetch: Fetch) -> str:
    if not fetch.total or fetch.done is None:
        return ""
    return f": {100 * fetch.done // fetch.total} % of {fetch.total / _GIB:.1f} GiB"
