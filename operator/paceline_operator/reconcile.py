"""One pass over one service: what is there, what should be, apply the difference, say so in the status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from paceline_core.knobs import knobs_to_wire
from paceline_operator.cluster import Cluster
from paceline_operator.drift import drift, is_left_over, is_owned_by, project
from paceline_operator.effective import Effective, effective, read_override, tuned_name
from paceline_operator.errors import ApiRefused, ApiUnavailable, ForeignObject, SpecError
from paceline_operator.events import decisions, event_of
from paceline_operator.knob_sync import PodKnobs, Target, states
from paceline_operator.metrics import Metrics
from paceline_operator.names import ADMIN_STAMP, APPLIED, KIND, admin_token, digest
from paceline_operator.pod import restart_hash
from paceline_operator.pods import instances, is_mounting
from paceline_operator.policy import check_policy
from paceline_operator.render import Manifest, render
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService, parse_service
from paceline_operator.status import Observation, merge_patch, status_of
from paceline_operator.store import Key, Store

__all__ = ["Pass", "Reconciler"]

logger = logging.getLogger(__name__)
_SECRET_RETRY = 30.0  # seconds between two looks at a Secret that pods may be waiting for


@dataclass(frozen=True, slots=True)
class Pass:
    """Outcome of a pass: the knobs that pods shall have (None: leave them), and whether something is to be tried again."""

    target: Target | None = None
    retry: bool = False


@dataclass(slots=True)
class Reconciler:
    """Brings one service at a time to what its spec says. `clock` is monotonic seconds."""

    settings: Settings
    cluster: Cluster
    store: Store
    metrics: Metrics
    clock: Callable[[], float]
    # the server's own form of what we applied, where it writes things in another way, by service and kind: (stamp, fields)
    _accepted: dict[tuple[Key, str], tuple[str, Any]] = field(default_factory=dict)
    _secrets: dict[Key, float] = field(default_factory=dict)

    async def reconcile(self, key: Key, knobs: Mapping[str, PodKnobs]) -> Pass:
        """Do one pass. Raises `ApiUnavailable` if the API server can't be reached: nothing is known then."""
        body = self.store.service(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)  # owner references delete the children
            return Pass()
        try:
            service = parse_service(body)
            check_policy(service, self.settings)
        except SpecError as error:
            await self._report(key, body, None, str(error), None, knobs)
            return Pass()
        found = await self._effective(key, service)
        failure = await self._apply_all(key, service)
        await self._report(key, body, service, "", failure, knobs, found)
        return Pass(None if failure else self._target(service, found), retry=failure is not None)

    async def _effective(self, key: Key, service: InferenceService) -> Effective:
        """Return the knobs in force. An override that isn't any more is emptied, so that no pod reads it and an edit that
        is taken back doesn't bring it back."""
        live = self.store.get(key, "ConfigMap", tuned_name(service.name))
        if live is None or not is_owned_by(live, service.uid):
            return effective(service, None)
        found = effective(service, read_override(live))
        if found.dropped:
            meta = live["metadata"]
            logger.info("%s/%s: what tuning found is dropped: %s", key.namespace, service.name, found.dropped)
            patch = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "data": None}
            emptied = await self.cluster.merge("ConfigMap", key.namespace, meta["name"], patch)
            if emptied is not None:
                self.store.put("ConfigMap", emptied)
        return found

    def _target(self, service: InferenceService, found: Effective) -> Target:
        wire = knobs_to_wire(found.knobs)
        return Target(wire, digest(wire), restart_hash(service), admin_token(self.settings.operator_key, service.uid))

    def _forget(self, key: Key) -> None:
        self._secrets.pop(key, None)
        for known in [known for known in self._accepted if known[0] == key]:
            del self._accepted[known]

    async def _apply_all(self, key: Key, service: InferenceService) -> tuple[str, str] | None:
        """Apply what differs; return reason and message if a child can't be applied."""
        secret, *children = render(service, self.settings, pdb_version=self.cluster.pdb_version)
        try:
            # all looks come before the first write, so that a name that is taken leaves nothing half-made
            live = [await self._look(key, service, child) for child in children]
            await self._ensure_secret(key, secret, live[-1])
            for child, found in zip(children, live, strict=True):
                await self._ensure(key, child, found)
        except ForeignObject as error:
            return error.reason, str(error)
        except ApiRefused as error:
            return "Forbidden" if error.status == 403 else "Rejected", str(error)
        return None

    async def _look(self, key: Key, service: InferenceService, child: Manifest) -> Manifest | None:
        """Return the live child. Raises `ForeignObject` if somebody else has it."""
        kind, name = child["kind"], child["metadata"]["name"]
        live = self.store.get(key, kind, name)
        if live is None or not is_owned_by(live, service.uid):
            # objects without our label aren't watched, and what is watched may be a moment old
            live = await self.cluster.get(kind, service.namespace, name)
            if live is not None:
                self.store.put(kind, live)
        if live is not None and not is_owned_by(live, service.uid):
            raise _foreign(live, service)
        if live is not None and "deletionTimestamp" in live["metadata"]:
            raise ApiUnavailable(f"{kind} {name} is being deleted")
        return live

    async def _ensure_secret(self, key: Key, secret: Manifest, deployment: Manifest | None) -> None:
        """Apply the Secret unless the Deployment says that it was; again if pods seem to wait for it."""
        stamp = secret["metadata"]["annotations"][APPLIED]
        known = deployment is not None and deployment["metadata"].get("annotations", {}).get(ADMIN_STAMP) == stamp
        waiting = any(is_mounting(pod) for pod in self.store.all(key, "Pod"))
        recent = self.clock() - self._secrets.get(key, -_SECRET_RETRY) < _SECRET_RETRY
        if known and not (waiting and not recent):
            return
        try:
            await self.cluster.apply(secret)
        except ApiRefused as error:
            if error.status != 422:
                raise
            name = secret["metadata"]["name"]
            raise ForeignObject(f"a Secret called {name} exists and isn't this service's: delete it ({error})") from error
        self._secrets[key] = self.clock()

    async def _ensure(self, key: Key, child: Manifest, live: Manifest | None) -> None:
        kind, meta = child["kind"], child["metadata"]
        stamp = meta["annotations"][APPLIED]
        if live is not None:
            difference = self._difference(key, child, live)
            if difference is None:
                return
            if (live["metadata"].get("annotations") or {}).get(APPLIED) == stamp:
                logger.info("%s %s/%s: somebody changed %s, set back", kind, key.namespace, meta["name"], difference)
                self.metrics.drift_corrected.labels(kind).inc()
        applied = await self.cluster.apply(child)
        self.store.put(kind, applied)
        if drift(child, applied) is not None:
            self._accepted[key, kind] = (stamp, project(child, applied))

    def _difference(self, key: Key, child: Manifest, live: Manifest) -> str | None:
        """Return where `live` differs from what we applied, in our words or in the server's."""
        found = drift(child, live)
        if found and self._accepted.get((key, child["kind"])) == (
            child["metadata"]["annotations"][APPLIED],
            project(child, live),
        ):
            return None
        return found

    async def _report(
        self,
        key: Key,
        body: Manifest,
        service: InferenceService | None,
        error: str,
        failure: tuple[str, str] | None,
        knobs: Mapping[str, PodKnobs],
        found: Effective | None = None,
    ) -> None:
        """Write the status if it changed, and an event for each decision in it."""
        pods = self.store.all(key, "Pod")
        running = instances(pods)
        if service is not None and found is not None:
            told = states(self._target(service, found), running, knobs)
        else:  # nobody asks for anything else
            told = {pod.name: knobs[pod.name] for pod in running if pod.name in knobs}
        deployments = self.store.all(key, "Deployment")
        seen = Observation(
            body=body,
            service=service,
            effective=found,
            now=now(),
            spec_error=error,
            failure=failure,
            deployment=next((d for d in deployments if is_owned_by(d, body["metadata"]["uid"])), None),
            pods=pods,
            knobs=told,
        )
        old, new = body.get("status") or {}, status_of(seen)
        patch = merge_patch(old, new)
        if not patch:
            return
        meta = body["metadata"]
        updated = await self.cluster.patch_status(key.namespace, meta["name"], meta["resourceVersion"], patch)
        if updated is None:
            return  # deleted meanwhile
        self.store.put(KIND, updated)
        for decision in decisions(old, new):
            logger.info("%s/%s: %s: %s", key.namespace, meta["name"], decision.reason, decision.message)
            await self._record(event_of(body, decision, seen.now))

    async def _record(self, event: Manifest) -> None:
        try:
            await self.cluster.create_event(event)
        except (ApiRefused, ApiUnavailable) as error:  # a namespace that is going takes none
            logger.warning("an event couldn't be recorded: %s", error)


def _foreign(live: Manifest, service: InferenceService) -> ForeignObject:
    what = f"{live['kind']} called {live['metadata']['name']}"
    if is_left_over(live, service.name, service.uid):
        text = f"waits until the {what} has been deleted together with the earlier {KIND} that it belongs to"
        return ForeignObject(text, reason="Replacing")
    remedy = "delete or rename it, or rename the InferenceService"
    return ForeignObject(f"a {what} exists and isn't this service's: {remedy}")


def now() -> str:
    """Return the time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
