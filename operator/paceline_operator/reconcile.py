"""One pass over one service: what is there, what should be, apply the difference, say so in the status."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import time

from paceline_core.knobs import knobs_to_wire
from paceline_operator.acceptance import Acceptor
from paceline_operator.applier import Applier
from paceline_operator.children import Manifest
from paceline_operator.cluster import Cluster
from paceline_operator.drift import is_owned_by
from paceline_operator.effective import Effective, effective, read_override, tuned_name
from paceline_operator.errors import ApiRefused, ApiUnavailable, SpecError
from paceline_operator.events import decisions, event_of
from paceline_operator.knob_sync import PodKnobs, Target, states
from paceline_operator.metrics import Metrics
from paceline_operator.names import KIND, admin_token, base_name, digest
from paceline_operator.outcome import Applied, FetchState
from paceline_operator.pods import instances, is_fetcher, is_leaving, steady_in
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService
from paceline_operator.status import Observation, TuningStatus, merge_patch, status_of
from paceline_operator.store import Key, Store
from paceline_operator.tuning.overrides import IN_FORCE, Trying, read_trying
from paceline_operator.turns import Turns

__all__ = ["Pass", "Reconciler"]

logger = logging.getLogger(__name__)


_FETCH_LOOK = 5.0  # seconds between two looks at a download


async def _unknown(_address: str, _token: str) -> tuple[int, int] | None:
    return None


@dataclass(frozen=True, slots=True)
class Pass:
    """Outcome of a pass: the knobs that pods shall have (None: leave them), whether something failed and is to be tried
    again, and in how many seconds it is worth a look otherwise."""

    target: Target | None = None
    retry: bool = False
    again: float | None = None


@dataclass(slots=True)
class Reconciler:
    """Brings one service at a time to what its spec says. `clock` is monotonic seconds."""

    settings: Settings
    cluster: Cluster
    store: Store
    metrics: Metrics
    clock: Callable[[], float]
    acceptor: Acceptor
    tuning: Callable[[Key], TuningStatus | None] = lambda _: None
    wake: Callable[[Key], None] = lambda _: None  # asks for a look at a service whose turn may have come
    # asks the pod that fetches a model (address, token) for the bytes that are there and those of the model
    progress: Callable[[str, str], Awaitable[tuple[int, int] | None]] = _unknown
    # seconds that the first status of a service waits for the Deployment's first news, unless it is bad or good news
    first_status_after: float = 0.0
    applier: Applier = field(init=False)
    _first_seen: dict[Key, float] = field(default_factory=dict)  # services that have no status yet

    def __post_init__(self) -> None:
        turns = Turns(self.settings.class_rollouts, self.wake)
        self.applier = Applier(self.settings, self.cluster, self.store, self.metrics, self.clock, turns)

    def resume(self) -> None:
        """Go on where an earlier operator ended, once everything is listed and before the first pass."""
        for key in self.store:
            body = self.store.service(key)
            if body is not None:
                with suppress(SpecError):  # its own pass tells
                    self.applier.resume(key, self.acceptor.accept(key, body))

    async def reconcile(self, key: Key, knobs: Mapping[str, PodKnobs]) -> Pass:
        """Do one pass. Raises `ApiUnavailable` if the API server can't be reached: nothing is known then."""
        body = self.store.service(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self.applier.forget(key)  # owner references delete the children
            self.acceptor.forget(key)
            self._first_seen.pop(key, None)
            return Pass()
        try:
            service = self.acceptor.accept(key, body)
        except SpecError as error:
            self.applier.pause(key, body["metadata"]["uid"])
            await self._report(key, body, knobs, refusal=error)
            return Pass()
        found = await self._effective(key, service)
        applied = await self.applier.apply(key, service, body["metadata"].get("annotations") or {})
        target = self._target(service, found, applied)
        applied = await self._watch_fetch(key, applied, target.token)
        held = await self._report(key, body, knobs, service=service, found=found, applied=applied, target=target)
        failed = applied.failure is not None
        calm = steady_in(self.store.all(key, "Pod"), time())
        waits = [seconds for seconds in (applied.again, calm or None, held or None) if seconds is not None]
        return Pass(None if failed else target, retry=failed or bool(applied.troubles), again=min(waits, default=None))

    async def _watch_fetch(self, key: Key, applied: Applied, token: str) -> Applied:
        """Ask the pod that fetches a model how far it is, and come back to ask again."""
        if applied.fetch is None or applied.fetch.state is not FetchState.FETCHING:
            return applied
        pods = [pod for pod in self.store.all(key, "Pod") if is_fetcher(pod) and not is_leaving(pod)]
        addresses = [address for pod in pods if (address := pod.get("status", {}).get("podIP"))]
        told = await self.progress(addresses[0], token) if addresses else None
        done, total = told or (None, None)
        waits = [seconds for seconds in (applied.again, _FETCH_LOOK) if seconds is not None]
        return replace(applied, fetch=replace(applied.fetch, done=done, total=total), again=min(waits))

    async def _effective(self, key: Key, service: InferenceService) -> Effective:
        """Return the knobs in force. An override that isn't any more is taken out, so that no pod reads it and an edit that
        is taken back doesn't bring it back; the history of tuning stays."""
        live = self.store.get(key, "ConfigMap", tuned_name(service.name))
        if live is None or not is_owned_by(live, service.uid):
            return effective(service, None)
        found = effective(service, read_override(live))
        if found.dropped:
            meta = live["metadata"]
            logger.info("%s/%s: what tuning found is dropped: %s", key.namespace, service.name, found.dropped)
            patch = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "data": dict.fromkeys(IN_FORCE)}
            emptied = await self.cluster.merge("ConfigMap", key.namespace, meta["name"], patch)
            if emptied is not None:
                self.store.put("ConfigMap", emptied)
        return found

    def _target(self, service: InferenceService, found: Effective, applied: Applied) -> Target:
        wire, token = knobs_to_wire(found.knobs), admin_token(self.settings.operator_key, service.uid, applied.salt)
        trying = self._trying(service, found)
        about = digest([wire, sorted(trying.pods), dict(trying.knobs)] if trying.pods else wire)
        return Target(wire, about, applied.restart_hash, token, trying.pods, trying.knobs)

    def _trying(self, service: InferenceService, found: Effective) -> Trying:
        """Return what tuning tries on some of the pods."""
        live = self.store.get(Key(service.namespace, base_name(service.name)), "ConfigMap", tuned_name(service.name))
        if live is None or service.tuning.mode != "Auto" or not is_owned_by(live, service.uid):
            return Trying()
        return read_trying(live, found.spec_hash)

    async def _report(
        self,
        key: Key,
        body: Manifest,
        knobs: Mapping[str, PodKnobs],
        *,
        service: InferenceService | None = None,
        found: Effective | None = None,
        applied: Applied | None = None,
        target: Target | None = None,
        refusal: SpecError | None = None,
    ) -> float:
        """Write the status if it changed, and an event for each decision in it; return the seconds that it is held back."""
        everything = self.store.all(key, "Pod")
        pods = [pod for pod in everything if not is_fetcher(pod)]
        running = instances(pods)
        if target is not None:
            told = states(target, running, knobs)
        else:  # nobody asks for anything else
            told = {pod.name: knobs[pod.name] for pod in running if pod.name in knobs}
        deployments = self.store.all(key, "Deployment")
        seen = Observation(
            body=body,
            service=service,
            effective=found,
            now=now(),
            spec_error=str(refusal) if refusal else "",
            spec_reason=refusal.reason if refusal else "",
            applied=applied or Applied(),
            deployment=next((d for d in deployments if is_owned_by(d, body["metadata"]["uid"])), None),
            pods=pods,
            knobs=told,
            tuning=self.tuning(key),
            fetchers=[pod for pod in everything if is_fetcher(pod)],
        )
        old, new = body.get("status") or {}, status_of(seen)
        patch = merge_patch(old, new)
        if not patch:
            return 0.0
        if wait := self._hold_first(key, old, new):
            return wait
        meta = body["metadata"]
        updated = await self.cluster.patch_status(key.namespace, meta["name"], meta["resourceVersion"], patch)
        if updated is None:
            return 0.0  # deleted meanwhile
        self.store.put(KIND, updated)
        for decision in decisions(old, new):
            logger.info("%s/%s: %s: %s", key.namespace, meta["name"], decision.reason, decision.message)
            await self._record(event_of(body, decision, seen.now))
        return 0.0

    def _hold_first(self, key: Key, old: Manifest, new: Manifest) -> float:
        """Return the seconds that a first status waits. The Deployment tells of itself within a second: a fleet that is
        created at once costs one status write per service less. News, good and bad, is told at once."""
        if not (old.get("conditions") or decisions(old, new)):
            waited = self.clock() - self._first_seen.setdefault(key, self.clock())
            if waited < self.first_status_after:
                return self.first_status_after - waited
        self._first_seen.pop(key, None)
        return 0.0

    async def _record(self, event: Manifest) -> None:
        try:
            await self.cluster.create_event(event)
        except (ApiRefused, ApiUnavailable) as error:  # a namespace that is going takes none
            logger.warning("an event couldn't be recorded: %s", error)


def now() -> str:
    """Return the time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
