"""Brings the children of one service to what is rendered: apply what differs, delete what isn't wanted, nothing else.

A new child costs one call: it is applied on the condition that there is no object of its name. A child that is as it should
be costs none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import time
from typing import Any

from paceline_operator.api_kinds import KINDS, OPTIONAL
from paceline_operator.children import Manifest
from paceline_operator.children_cache import fetch_name, fetch_of, has_fetch, parked
from paceline_operator.cluster import Cluster
from paceline_operator.contest import Contest, Contests, last_writer
from paceline_operator.drift import drift, is_left_over, is_owned_by, project
from paceline_operator.errors import ApiRefused, ApiUnavailable, ForeignObject
from paceline_operator.metrics import Metrics
from paceline_operator.names import ADMIN_STAMP, APPLIED, KIND, RESTART_HASH, ROTATE, TOKENS, UPGRADE
from paceline_operator.outcome import Applied, FetchState, Trouble
from paceline_operator.pods import is_mounting
from paceline_operator.render import missing_kinds, render
from paceline_operator.rollout import rollout_of
from paceline_operator.rotation import Salts, salts_of
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService
from paceline_operator.store import Key, Store
from paceline_operator.turns import Turns, has_turn, in_turn, with_notes
from paceline_operator.upgrade import hold

__all__ = ["Applier"]

logger = logging.getLogger(__name__)
_SECRET_RETRY = 30.0  # seconds between two looks at a Secret that pods may be waiting for
# seconds after which a Secret that was there before the service's Deployment is looked for again: it may be an earlier
# service's of the name, and a garbage collector that saw it with its old owner deletes it a moment later all the same
_SECRET_LOOKS = (5.0, 30.0)


@dataclass(slots=True)
class Applier:
    """Applies the children of one service at a time. `clock` is monotonic seconds."""

    settings: Settings
    cluster: Cluster
    store: Store
    metrics: Metrics
    clock: Callable[[], float]
    turns: Turns
    wall: Callable[[], float] = time  # seconds since 1970
    # the server's own form of what we applied, where it writes things in another way, by child: (stamp, fields)
    _accepted: dict[tuple[Key, str], tuple[str, Any]] = field(default_factory=dict)
    _secrets: dict[Key, float] = field(default_factory=dict)
    # for which service (uid) the Secret was met, and when to look for it again, by the clock
    _looks: dict[Key, tuple[str, list[float]]] = field(default_factory=dict)
    _contests: Contests = field(default_factory=Contests)

    def forget(self, key: Key) -> None:
        """Forget a service that is gone."""
        self.turns.end(key)
        self._secrets.pop(key, None)
        self._looks.pop(key, None)
        for kind in KINDS:
            self._accepted.pop((key, kind), None)
            self._contests.forget((key, kind))

    def pause(self, key: Key, uid: str) -> None:
        """Note that nothing can be applied to a service for now."""
        self.turns.pause(key, rolling=self._is_rolling(key, self._deployment(key, uid)))

    def resume(self, key: Key, service: InferenceService) -> None:
        """Give a service back the turn that it had under an earlier operator, if its pods still roll."""
        live = self._deployment(key, service.uid)
        if live is not None and has_turn(live) and self._is_rolling(key, live):
            self.turns.keep(key, service.class_name)

    async def apply(self, key: Key, service: InferenceService, annotations: Mapping[str, str]) -> Applied:
        """Apply what differs. Raises `ApiUnavailable` if the API server can't be reached."""
        apis = self.cluster.apis
        live = self._deployment(key, service.uid)
        salts = self._salts(live, annotations.get(ROTATE, ""))
        upgrade = annotations.get(UPGRADE, "")
        secret, *others, fresh = render(service, self.settings, apis, upgrade=upgrade, salts=salts.accepted)
        deployment, held = hold(fresh, live)
        deployment, waiting = self._in_turn(key, service, deployment, live)
        fetch = fetch_of(service, self.store.get(key, "Job", fetch_name(service))) if has_fetch(service, apis) else None
        if fetch is not None and fetch.state is not FetchState.READY:
            deployment = parked(deployment, live)
        deployment = with_notes(deployment, salts.notes())
        failure, troubles = await self._apply_all(key, service, secret, [*others, deployment], live)
        contests = self._open_contests(key)
        return Applied(
            restart_hash=deployment["spec"]["template"]["metadata"]["annotations"][RESTART_HASH],
            failure=failure,
            held=held,
            waiting=waiting,
            troubles=troubles,
            missing=tuple(missing_kinds(service, self.settings, apis)),
            contested=tuple(_contest_words(kind, contest) for kind, contest in contests.items()),
            again=min([*map(self._again, contests.values()), *self._until(salts), *self._until_look(key)], default=None),
            salt=salts.calling,
            fetch=fetch,
        )

    def _salts(self, live: Manifest | None, wanted: str) -> Salts:
        recorded = None if live is None else (live["metadata"].get("annotations") or {}).get(TOKENS, "")
        return salts_of(recorded, wanted, self.wall())

    def _until(self, salts: Salts) -> list[float]:
        return [] if salts.previous is None else [max(0.0, salts.until - self.wall())]

    def _until_look(self, key: Key) -> list[float]:
        return [max(0.0, at - self.clock()) for at in self._looks.get(key, ("", []))[1]]

    def _in_turn(
        self, key: Key, service: InferenceService, deployment: Manifest, live: Manifest | None
    ) -> tuple[Manifest, bool]:
        rolling = self._is_rolling(key, live)
        return in_turn(self.turns, key, service.class_name, deployment, live, rolling=rolling)

    def _deployment(self, key: Key, uid: str) -> Manifest | None:
        found = self.store.get(key, "Deployment", key.base)
        return found if found is not None and is_owned_by(found, uid) else None

    def _is_rolling(self, key: Key, live: Manifest | None) -> bool:
        rollout = rollout_of(live, self.store.all(key, "Pod"))
        return rollout is not None and not rollout.complete

    async def _apply_all(
        self, key: Key, service: InferenceService, secret: Manifest, children: list[Manifest], live: Manifest | None
    ) -> tuple[Trouble | None, tuple[Trouble, ...]]:
        """Return what keeps the pods from being as they should be, and what is wrong with children they can do without."""
        troubles: list[Trouble] = []
        try:
            await self._ensure_secret(key, secret, live)
            for child in children:
                try:
                    await self._ensure(key, service, child)
                except (ForeignObject, ApiRefused) as error:
                    if child["kind"] not in OPTIONAL:
                        raise
                    troubles.append(_trouble(error))
            await self._prune(key, service, children)
        except (ForeignObject, ApiRefused) as error:
            return _trouble(error), tuple(troubles)
        return None, tuple(troubles)

    async def _ensure_secret(self, key: Key, secret: Manifest, deployment: Manifest | None) -> None:
        """Apply the Secret unless the Deployment says that it was; again if pods seem to wait for it, or if it may have
        gone with an earlier service."""
        stamp = secret["metadata"]["annotations"][APPLIED]
        known = deployment is not None and deployment["metadata"].get("annotations", {}).get(ADMIN_STAMP) == stamp
        waiting = any(is_mounting(pod) for pod in self.store.all(key, "Pod"))
        recent = self.clock() - self._secrets.get(key, -_SECRET_RETRY) < _SECRET_RETRY
        due = self._look_is_due(key)
        if known and not due and not (waiting and not recent):
            return
        try:
            await self._apply_secret(key, secret, first=deployment is None)
        except ApiRefused as error:
            if error.status != 422:
                raise
            name = secret["metadata"]["name"]
            raise ForeignObject(f"a Secret called {name} exists and isn't this service's: delete it ({error})") from error
        self._secrets[key] = self.clock()

    async def _apply_secret(self, key: Key, secret: Manifest, *, first: bool) -> None:
        if first and await self.cluster.create(secret) is not None:
            return
        await self.cluster.apply(secret)
        uid = secret["metadata"]["ownerReferences"][0]["uid"]
        if first and self._looks.get(key, ("", []))[0] != uid:  # it was there before; planned once per service
            self._looks[key] = uid, [self.clock() + seconds for seconds in _SECRET_LOOKS]

    def _look_is_due(self, key: Key) -> bool:
        uid, planned = self._looks.get(key, ("", []))
        left = [at for at in planned if at > self.clock()]
        if left != planned:
            self._looks[key] = uid, left
        return left != planned

    async def _ensure(self, key: Key, service: InferenceService, child: Manifest) -> None:
        """Make the child, or set it right if it isn't as it should be."""
        kind = child["kind"]
        live = self.store.get(key, kind, child["metadata"]["name"])
        if live is None and (made := await self.cluster.create(child)) is not None:
            self._took(key, child, made)
            return
        if live is None or not is_owned_by(live, service.uid):
            # objects without our label aren't watched, and what is watched may be a moment old
            live = await self.cluster.get(kind, service.namespace, child["metadata"]["name"])
        if live is not None:
            _check_owner(live, service)
            self.store.put(kind, live)
            if kind == "Job":  # its template can't be changed, and a finished one is the mark that the model is there
                return
            if not await self._may_correct(key, child, live):
                return
            await self.cluster.claim(live)
        self._took(key, child, await self.cluster.apply(child))

    async def _may_correct(self, key: Key, child: Manifest, live: Manifest) -> bool:
        """Return whether the child differs and may be written now; one that others keep changing has to wait."""
        kind, name = child["kind"], child["metadata"]["name"]
        path = self._difference(key, child, live)
        if path is None:
            return False
        if (live["metadata"].get("annotations") or {}).get(APPLIED) != child["metadata"]["annotations"][APPLIED]:
            return True  # what we want has changed
        now = self.clock()
        known = self._contests.get((key, kind), now)
        if known is not None and now < known.due:
            return False
        writer = last_writer(await self.cluster.get(kind, key.namespace, name) or {}) if known and known.open else ""
        self._contests.corrected((key, kind), path, writer, now)
        logger.info("%s %s/%s: somebody changed %s, set back", kind, key.namespace, name, path)
        self.metrics.drift_corrected.labels(kind).inc()
        return True

    def _took(self, key: Key, child: Manifest, applied: Manifest) -> None:
        """Keep what came of an apply, and the server's own form of it."""
        kind = child["kind"]
        self.store.put(kind, applied)
        if drift(child, applied) is not None:
            self._accepted[key, kind] = (child["metadata"]["annotations"][APPLIED], project(child, applied))

    def _difference(self, key: Key, child: Manifest, live: Manifest) -> str | None:
        """Return where `live` differs from what we applied, in our words or in the server's."""
        found = drift(child, live)
        if found and self._accepted.get((key, child["kind"])) == (
            child["metadata"]["annotations"][APPLIED],
            project(child, live),
        ):
            return None
        return found

    async def _prune(self, key: Key, service: InferenceService, children: list[Manifest]) -> None:
        """Delete what we made for this service and don't want any more; it carries our stamp, our label and our owner."""
        wanted = {(child["kind"], child["metadata"]["name"]) for child in children}
        for kind in KINDS:
            for live in self.store.all(key, kind) if kind != "Pod" else ():
                meta = live["metadata"]
                ours = is_owned_by(live, service.uid) and APPLIED in (meta.get("annotations") or {})
                if ours and (kind, meta["name"]) not in wanted and "deletionTimestamp" not in meta:
                    logger.info("%s %s/%s isn't wanted any more", kind, key.namespace, meta["name"])
                    await self.cluster.delete(live)
                    self.store.remove(kind, live)

    def _open_contests(self, key: Key) -> dict[str, Contest]:
        now = self.clock()
        found = {kind: self._contests.get((key, kind), now) for kind in KINDS}
        return {kind: contest for kind, contest in found.items() if contest is not None and contest.open}

    def _again(self, contest: Contest) -> float:
        now = self.clock()
        return max(0.0, (contest.due if now < contest.due else contest.over) - now)


def _trouble(error: ForeignObject | ApiRefused) -> Trouble:
    if isinstance(error, ForeignObject):
        return error.reason, str(error)
    return "Forbidden" if error.status == 403 else "Rejected", str(error)


def _contest_words(kind: str, contest: Contest) -> str:
    who = contest.writer or "somebody"
    return f"{who} keeps changing {contest.path} of the {kind}: set back {contest.count} times, now more and more rarely"


def _check_owner(live: Manifest, service: InferenceService) -> None:
    """Raise `ForeignObject` if somebody else has the child's name, `ApiUnavailable` if it is about to be free."""
    what = f"{live['kind']} called {live['metadata']['name']}"
    if is_owned_by(live, service.uid):
        if "deletionTimestamp" in live["metadata"]:
            raise ApiUnavailable(f"the {what} is being deleted")
        return
    if is_left_over(live, service.name, service.uid):
        text = f"waits until the {what} has been deleted together with the earlier {KIND} that it belongs to"
        raise ForeignObject(text, reason="Replacing")
    remedy = "delete or rename it, or rename the InferenceService"
    raise ForeignObject(f"a {what} exists and isn't this service's: {remedy}")
