"""Brings the knobs of running pods to what the spec says: what differs is patched, without touching a template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline_core.errors import KnobError
from paceline_core.knobs import KNOBS, CostClass
from paceline_core.wire import KnobsDocument
from paceline_operator.admin_client import AdminClient
from paceline_operator.errors import AdminError
from paceline_operator.metrics import Metrics
from paceline_operator.pods import Instance

__all__ = ["KnobState", "KnobSync", "PodKnobs", "Target", "difference", "states"]

_SOON = 1.0  # seconds: a change applies at a step boundary, which is a matter of milliseconds, or of one long prefill
_STARTED = "the pod is starting"
_STARTING = 10.0  # seconds: a pod that becomes ready is looked at because of that; this is only for lost events


class KnobState(StrEnum):
    """Where a pod's knobs stand."""

    SYNCED = "Synced"
    PENDING = "Pending"  # accepted, or asked again soon: starting, lost race
    NEEDS_RESTART = "NeedsRestart"  # the pod is of an older template and goes with the rollout
    REFUSED = "Refused"
    UNREACHABLE = "Unreachable"


@dataclass(frozen=True, slots=True)
class PodKnobs:
    """The knobs of one pod as last seen. `verified` says for which target and process that was.

    `again` is the number of seconds until the pod is worth asking again by itself (None: its own events say when).
    """

    state: KnobState
    message: str = ""
    revision: int | None = None
    epoch: int | None = None
    verified: tuple[str, str] = ("", "")
    again: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What the pods of a service shall have: all knobs in wire form, their digest, the restart hash, the token.

    While tuning tries a change, `trial_pods` have `trial_knobs` on top.
    """

    knobs: Mapping[str, Any] = field(repr=False)
    digest: str
    restart_hash: str
    token: str = field(repr=False)
    trial_pods: frozenset[str] = frozenset()
    trial_knobs: Mapping[str, Any] = field(default_factory=dict)

    def knobs_of(self, pod: str) -> Mapping[str, Any]:
        """Return all knobs that the pod of that name shall have."""
        return {**self.knobs, **self.trial_knobs} if pod in self.trial_pods else self.knobs


def difference(wanted: Mapping[str, Any], document: KnobsDocument) -> tuple[dict[str, Any], list[str]]:
    """Return the knobs to patch (wire form) and the names of those that differ but need a new process.

    What the pod has accepted and not applied yet counts as it will be. A knob that an older pod doesn't know is left out.
    """
    have = {**document.knobs, **document.desired}
    patch, restart = {}, []
    for spec in KNOBS:
        if spec.name not in wanted or spec.name not in have or _same(spec, wanted[spec.name], have[spec.name]):
            continue
        if spec.cost is CostClass.RESTART:
            restart.append(spec.name)
        else:
            patch[spec.name] = wanted[spec.name]
    return patch, restart


def _same(spec: Any, wanted: Any, have: Any) -> bool:
    """Compare values, not texts: `50ms` and `0.05s` are one duration."""
    try:
        return bool(spec.parse(wanted) == spec.parse(have))
    except KnobError:
        return False


class KnobSync:
    """Synchronises the pods of one service at a time; keeps nothing between calls but counters."""

    def __init__(self, client: AdminClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    async def sync(
        self, target: Target, pods: list[Instance], known: Mapping[str, PodKnobs], *, verify: bool
    ) -> dict[str, PodKnobs]:
        """Return the knob state by pod name. Pods that were verified for this target are left alone unless `verify`."""
        due = [pod for pod in pods if verify or not _settled(known.get(pod.name), target, pod)]
        results = await asyncio.gather(*(self._sync_pod(target, pod, known.get(pod.name)) for pod in due))
        fresh = dict(zip((pod.name for pod in due), results, strict=True))
        return {pod.name: fresh.get(pod.name) or known[pod.name] for pod in pods}

    async def _sync_pod(self, target: Target, pod: Instance, known: PodKnobs | None) -> PodKnobs:
        # a pod that we haven't patched would still take a change of an earlier leader: the first call brings our number
        news = self._client.fence > 0 and (known is None or known.verified[1] != pod.process)
        try:
            document = await self._client.knobs(pod.address, target.token)
            patch, _ = difference(target.knobs_of(pod.name), document)
            if patch or news:
                document = await self._client.patch_knobs(pod.address, target.token, patch, document.revision)
        except AdminError as error:
            return self._failed(target, pod, error)
        if patch:
            self._metrics.knob_patches.labels("applied").inc()
        return _outcome(target, pod, document)

    def _failed(self, target: Target, pod: Instance, error: AdminError) -> PodKnobs:
        if not pod.ready and error.status in (0, 503):
            return PodKnobs(KnobState.PENDING, _STARTED, again=_STARTING)
        if error.status in (409, 412):
            return PodKnobs(KnobState.PENDING, "somebody else changed its knobs at the same time; asked again", again=_SOON)
        outdated = pod.restart_hash != target.restart_hash
        self._metrics.knob_patches.labels("refused" if error.status else "unreachable").inc()
        if error.status == 422 and outdated:
            return PodKnobs(KnobState.NEEDS_RESTART, "goes with the rollout")
        state = KnobState.REFUSED if 400 <= error.status < 500 else KnobState.UNREACHABLE
        return PodKnobs(state, str(error))


def states(target: Target, pods: list[Instance], known: Mapping[str, PodKnobs]) -> dict[str, PodKnobs]:
    """Return the knob state by pod as it may be told: what was seen before the spec or the process changed may not hold."""
    return {pod.name: _told(target, pod, known.get(pod.name)) for pod in pods}


def _told(target: Target, pod: Instance, known: PodKnobs | None) -> PodKnobs:
    if known is None:
        return PodKnobs(KnobState.PENDING, "not asked yet" if pod.ready else _STARTED)
    if known.state in (KnobState.SYNCED, KnobState.NEEDS_RESTART) and not _settled(known, target, pod):
        return replace(known, state=KnobState.PENDING, message="not asked yet")
    return known


def _settled(known: PodKnobs | None, target: Target, pod: Instance) -> bool:
    return known is not None and known.verified == (target.digest, pod.process)


def _outcome(target: Target, pod: Instance, document: KnobsDocument) -> PodKnobs:
    patch, restart = difference(target.knobs_of(pod.name), document)
    if patch:
        message = f"not taken over yet: {', '.join(patch)}"
        return PodKnobs(KnobState.PENDING, message, document.revision, document.epoch, again=_SOON)
    verified = (target.digest, pod.process)
    if restart:
        # a pod of an older template goes with the rollout; one of this template read older files, so nothing else ends it
        remedy = "" if pod.restart_hash != target.restart_hash else ": delete the pod, a new one has them"
        message = f"needs a new process for {', '.join(restart)}{remedy}"
        return PodKnobs(KnobState.NEEDS_RESTART, message, document.revision, document.epoch, verified)
    if any(state == "pending" for state in document.status.values()):
        return PodKnobs(KnobState.PENDING, "applies at a step boundary", document.revision, document.epoch, again=_SOON)
    return PodKnobs(KnobState.SYNCED, "", document.revision, document.epoch, verified)
