"""How far a Deployment's rollout may deviate from its replicas. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline_local.manifests import Manifest

__all__ = ["Limits", "is_recreate", "limits_of"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How many pods a rollout may have above and below `replicas`."""

    replicas: int
    max_surge: int
    max_unavailable: int

    @property
    def min_available(self) -> int:
        """Pods that must stay available."""
        return max(self.replicas - self.max_unavailable, 0)


def _portion(value: Any, whole: int, *, up: bool) -> int:
    """Return an absolute number for `3` or `"25%"` of `whole`."""
    if isinstance(value, str) and value.endswith("%"):
        exact = int(value[:-1]) * whole / 100
        return math.ceil(exact) if up else math.floor(exact)
    return int(value)


def limits_of(deployment: Manifest) -> Limits:
    """Return the bounds of a Deployment's rollout: surge rounds up, unavailability down, and never are both zero."""
    spec = deployment["spec"]
    replicas = spec.get("replicas", 1)
    if is_recreate(deployment):
        return Limits(replicas, 0, replicas)
    rolling = (spec.get("strategy") or {}).get("rollingUpdate") or {}
    surge = _portion(rolling.get("maxSurge", "25%"), replicas, up=True)
    unavailable = _portion(rolling.get("maxUnavailable", "25%"), replicas, up=False)
    if surge == 0 and unavailable == 0:
        unavailable = 1
    return Limits(replicas, surge, min(unavailable, replicas))


def is_recreate(deployment: Manifest) -> bool:
    """Whether a rollout ends all old pods before it starts new ones."""
    return (deployment["spec"].get("strategy") or {}).get("type") == "Recreate"
