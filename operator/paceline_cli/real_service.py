"""A service on the real CPU engine, and traffic that suits it, for showing and measuring tuning without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from paceline_cli.fleet import Fleet, FleetError
from paceline_cli.load import run_load
from paceline_cli.tuned_service import tuned_service
from paceline_cli.workload import LoadRequest

__all__ = ["REAL_OUTPUTS", "REAL_TPOT", "REAL_TTFT", "REAL_WORDS", "real_manifest", "served_by", "too_much_for"]

REAL_TTFT, REAL_TPOT = 3.0, 0.3  # seconds
REAL_WORDS, REAL_OUTPUTS = (10, 40), (24, 40)  # prompts in words of one token, answers in tokens
# Of what pods with one slot each serve: their queue passes the objective after some ten seconds, while eight slots, that
# serve more than twice as much on two cores, still have room.
_OVERLOAD = 1.5
_PROBES, _CLIENTS = 32, 4  # requests, and how many at once: two pods with one slot each are never idle


def real_manifest(name: str, *, replicas: int, knobs: Mapping[str, Any], mode: str = "Auto") -> dict[str, Any]:
    """Return the InferenceService of SmolLM2-135M on CPU with `knobs` and an SLO, one core a pod."""
    return tuned_service(
        name, replicas=replicas, knobs=knobs, mode=mode, slo=(REAL_TTFT, REAL_TPOT), max_model_len=2048,
        requests={"cpu": "500m", "memory": "1Gi"}, limits={"cpu": "1", "memory": "2Gi"},
    )  # fmt: skip


def too_much_for(fleet: Fleet) -> float:
    """Return a rate (requests/s) that is too much for the pods of `fleet` under the knobs that they have.

    What they serve is measured: machines differ by ten times. Takes seconds. Raises `FleetError` if a request fails.
    """
    return _OVERLOAD * served_by(fleet)


def served_by(fleet: Fleet, clients: int = _CLIENTS, probes: int = _PROBES) -> float:
    """Return how many requests/s the pods of `fleet` serve to that many clients, each of which always has one under way.

    Raises `FleetError` if a request fails.
    """
    words, tokens = (sum(ends) // 2 for ends in (REAL_WORDS, REAL_OUTPUTS))
    outcomes = asyncio.run(
        run_load(fleet.url(), fleet.name, [LoadRequest("and " * words, tokens, 0.0)] * probes, concurrency=clients)
    )
    if failed := next((o.error for o in outcomes if o.error), ""):
        raise FleetError(f"the pods couldn't be measured: {failed}")
    return probes / max(o.end for o in outcomes)
