"""Deployment → ReplicaSets: which to create, scale and delete. Pure: objects in, actions out.

The rules are those of Kubernetes' deployment controller (pkg/controller/deployment): surge and unavailability bounds,
unhealthy old pods first, revision history, pause, rollback by template. Left out: proportional scaling of several
ReplicaSets while a rollout is under way; here the newest takes the change, and the rollout evens it out.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass

from paceline_local.manifests import Manifest, owner_reference
from paceline_local.rollout_limits import Limits, is_recreate, limits_of

__all__ = [
    "HASH_LABEL",
    "REVISION",
    "Action",
    "AnnotateReplicaSet",
    "CreateReplicaSet",
    "DeleteReplicaSet",
    "RolloutPlan",
    "ScaleReplicaSet",
    "find_current",
    "plan_rollout",
    "template_hash",
]

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # Kubernetes' safe letters: no vowels, no words
_HISTORY_LIMIT = 10


@dataclass(frozen=True, slots=True)
class CreateReplicaSet:
    """Create this ReplicaSet."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ScaleReplicaSet:
    """Set a ReplicaSet's `spec.replicas`."""

    name: str
    replicas: int


@dataclass(frozen=True, slots=True)
class AnnotateReplicaSet:
    """Give a ReplicaSet that is in use again its new revision."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class DeleteReplicaSet:
    """Delete an empty ReplicaSet that is older than the history keeps."""

    name: str


Action = CreateReplicaSet | ScaleReplicaSet | AnnotateReplicaSet | DeleteReplicaSet


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What to do now, and the revision that the Deployment should carry (None: leave it)."""

    actions: tuple[Action, ...]
    revision: str | None


def template_hash(template: Manifest, collisions: int = 0) -> str:
    """Return the short hash of a pod template that names its ReplicaSet; `collisions` makes another one."""
    text = json.dumps(template, sort_keys=True) + (str(collisions) if collisions else "")
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(10))


def _bare_template(replica_set: Manifest) -> Manifest:
    template: Manifest = copy.deepcopy(replica_set["spec"]["template"])
    labels = (template.get("metadata") or {}).get("labels") or {}
    labels.pop(HASH_LABEL, None)
    return template


def _same_template(left: Manifest, right: Manifest) -> bool:
    """Whether two templates are equal; servers add `creationTimestamp: null` to stored ones."""

    def plain(template: Manifest) -> Manifest:
        meta = {key: value for key, value in (template.get("metadata") or {}).items() if value}
        return template | {"metadata": meta}

    return plain(left) == plain(right)


def find_current(deployment: Manifest, replica_sets: list[Manifest]) -> Manifest | None:
    """Return the ReplicaSet of the Deployment's present template: the oldest, should there be several.

    The hash counts too: a server may add defaults to the one template and not to the other.
    """
    template = deployment["spec"]["template"]
    digest = template_hash(template, _collisions(deployment))
    ours = (
        rs
        for rs in _by_age(replica_sets)
        if (rs["metadata"].get("labels") or {}).get(HASH_LABEL) == digest or _same_template(_bare_template(rs), template)
    )
    return next(ours, None)


def _collisions(deployment: Manifest) -> int:
    return int((deployment.get("status") or {}).get("collisionCount") or 0)


def _by_age(replica_sets: list[Manifest]) -> list[Manifest]:
    return sorted(replica_sets, key=lambda rs: (rs["metadata"].get("creationTimestamp") or "", rs["metadata"]["name"]))


def _replicas(replica_set: Manifest) -> int:
    return int(replica_set["spec"].get("replicas", 1))


def _status(replica_set: Manifest, field: str) -> int:
    return int((replica_set.get("status") or {}).get(field) or 0)


def _revision(obj: Manifest) -> int:
    return int((obj["metadata"].get("annotations") or {}).get(REVISION) or 0)


def plan_rollout(deployment: Manifest, replica_sets: list[Manifest]) -> RolloutPlan:
    """Return the next actions for a Deployment and the ReplicaSets it controls (with their statuses up to date)."""
    current = find_current(deployment, replica_sets)
    old = [rs for rs in replica_sets if rs is not current]
    if deployment["spec"].get("paused"):
        return RolloutPlan(_scale_paused(deployment, current, old), None)
    if current is None:
        return _start(deployment, old)
    revision = _revision(current)
    newest_old = max((_revision(rs) for rs in old), default=0)
    if revision <= newest_old:  # rolled back to an earlier template: it is the newest revision again
        revision = newest_old + 1
        annotate: tuple[Action, ...] = (AnnotateReplicaSet(current["metadata"]["name"], str(revision)),)
    else:
        annotate = ()
    steps = _recreate(deployment, current, old) if is_recreate(deployment) else _roll(deployment, current, old)
    actions = (*annotate, *steps, *_forget(deployment, old))
    return RolloutPlan(actions, str(revision) if _revision(deployment) != revision else None)


def _start(deployment: Manifest, old: list[Manifest]) -> RolloutPlan:
    """Create the ReplicaSet of a template that has none; `Recreate` first waits until all old pods are gone."""
    if is_recreate(deployment) and any(_replicas(rs) or _status(rs, "replicas") for rs in old):
        return RolloutPlan(_scale_down_all(old), None)
    limits = limits_of(deployment)
    room = limits.replicas + limits.max_surge - sum(_replicas(rs) for rs in old)
    revision = str(max((_revision(rs) for rs in old), default=0) + 1)
    manifest = _replica_set(deployment, max(min(room, limits.replicas), 0), revision)
    return RolloutPlan((CreateReplicaSet(manifest),), revision if str(_revision(deployment)) != revision else None)


def _replica_set(deployment: Manifest, replicas: int, revision: str) -> Manifest:
    meta, spec = deployment["metadata"], deployment["spec"]
    digest = template_hash(spec["template"], _collisions(deployment))
    template = copy.deepcopy(spec["template"])
    template.setdefault("metadata", {}).setdefault("labels", {})[HASH_LABEL] = digest
    selector = copy.deepcopy(spec["selector"])
    selector.setdefault("matchLabels", {})[HASH_LABEL] = digest
    return {
        "metadata": {
            "name": f"{meta['name']}-{digest}",
            "namespace": meta["namespace"],
            "labels": dict(template["metadata"]["labels"]),
            "annotations": {REVISION: revision},
            "ownerReferences": [owner_reference(deployment)],
        },
        "spec": {
            "replicas": replicas,
            "minReadySeconds": spec.get("minReadySeconds", 0),
            "selector": selector,
            "template": template,
        },
    }


def _scale(replica_set: Manifest, replicas: int) -> tuple[Action, ...]:
    return () if _replicas(replica_set) == replicas else (ScaleReplicaSet(replica_set["metadata"]["name"], replicas),)


def _scale_down_all(old: list[Manifest]) -> tuple[Action, ...]:
    return tuple(action for rs in old for action in _scale(rs, 0))


def _scale_paused(deployment: Manifest, current: Manifest | None, old: list[Manifest]) -> tuple[Action, ...]:
    """While paused only `replicas` counts: the newest ReplicaSet that has pods (or the current one) takes the change."""
    everyone = [*old, *([current] if current else [])]
    active = [rs for rs in everyone if _replicas(rs)] or ([current] if current else [])
    if not active:
        return ()
    newest = max(active, key=_revision)
    others = sum(_replicas(rs) for rs in everyone if rs is not newest)
    return _scale(newest, max(deployment["spec"].get("replicas", 1) - others, 0))


def _recreate(deployment: Manifest, current: Manifest, old: list[Manifest]) -> tuple[Action, ...]:
    if any(_replicas(rs) or _status(rs, "replicas") for rs in old):
        return _scale_down_all(old)
    return _scale(current, deployment["spec"].get("replicas", 1))


def _roll(deployment: Manifest, current: Manifest, old: list[Manifest]) -> tuple[Action, ...]:
    limits = limits_of(deployment)
    grow = _scale(current, _grown(limits, current, old))
    if grow:
        return grow  # old ones shrink only after the statuses have caught up
    return _shrink_old(limits, current, old)


def _grown(limits: Limits, current: Manifest, old: list[Manifest]) -> int:
    """Return how many replicas the current ReplicaSet may have now."""
    have = _replicas(current)
    if have >= limits.replicas:
        return limits.replicas
    room = limits.replicas + limits.max_surge - have - sum(_replicas(rs) for rs in old)
    return have + max(min(room, limits.replicas - have), 0)


def _shrink_old(limits: Limits, current: Manifest, old: list[Manifest]) -> tuple[Action, ...]:
    """Scale old ReplicaSets down: pods that aren't available first, then as many as availability allows."""
    total = _replicas(current) + sum(_replicas(rs) for rs in old)
    missing = _replicas(current) - _status(current, "availableReplicas")
    budget = total - limits.min_available - max(missing, 0)
    targets = {rs["metadata"]["name"]: _replicas(rs) for rs in old}
    for rs in _by_age(old):
        unhealthy = max(_replicas(rs) - _status(rs, "availableReplicas"), 0)
        gone = min(unhealthy, max(budget, 0))
        targets[rs["metadata"]["name"]] -= gone
        budget -= gone
    available = _status(current, "availableReplicas") + sum(_status(rs, "availableReplicas") for rs in old)
    spare = min(available - limits.min_available, budget)
    for rs in _by_age(old):
        gone = min(targets[rs["metadata"]["name"]], max(spare, 0))
        targets[rs["metadata"]["name"]] -= gone
        spare -= gone
    return tuple(action for rs in old for action in _scale(rs, targets[rs["metadata"]["name"]]))


def _forget(deployment: Manifest, old: list[Manifest]) -> tuple[Action, ...]:
    """Delete the oldest revisions beyond `revisionHistoryLimit`, only those without pods."""
    limit = deployment["spec"].get("revisionHistoryLimit", _HISTORY_LIMIT)
    empty = [rs for rs in old if not _replicas(rs) and not _status(rs, "replicas")]
    surplus = len(old) - limit
    oldest = sorted(empty, key=_revision)[: max(surplus, 0)]
    return tuple(DeleteReplicaSet(rs["metadata"]["name"]) for rs in oldest)
