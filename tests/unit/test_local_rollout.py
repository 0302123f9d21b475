"""Deployment → ReplicaSets: the bounds of a rollout hold whatever the pods do, and every rollout ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_local.deployment_status import deployment_status, progress_deadline
from paceline_local.manifests import condition, timestamp
from paceline_local.replicaset import new_pod, next_available, plan_pods, replica_set_status
from paceline_local.rollout import (
    REVISION,
    AnnotateReplicaSet,
    CreateReplicaSet,
    DeleteReplicaSet,
    ScaleReplicaSet,
    find_current,
    plan_rollout,
    template_hash,
)
from paceline_local.rollout_limits import limits_of

NOW = 1_700_000_000.0


def deployment(replicas: int = 3, version: str = "v1", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "default", "uid": "d", "generation": 1},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": version}]}},
        }
        | spec,
    }


class World:
    """An API server in miniature: ReplicaSets and pods as the actions leave them."""

    def __init__(self, owner: dict[str, Any]) -> None:
        self.deployment = owner
        self.sets: list[dict[str, Any]] = []
        self.pods: dict[str, list[dict[str, Any]]] = {}
        self.now, self._count = NOW, 0

    def all_pods(self) -> list[dict[str, Any]]:
        return [pod for pods in self.pods.values() for pod in pods]

    def available(self) -> int:
        return sum(
            condition(pod, "Ready") is not None and condition(pod, "Ready")["status"] == "True" for pod in self.all_pods()
        )

    def set_ready(self, pod: dict[str, Any], ready: bool) -> None:
        status = "True" if ready else "False"
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": status, "lastTransitionTime": timestamp(self.now)}],
        }

    def round(self) -> bool:
        """Do what the controllers do in one round; return whether anything changed."""
        before = copy.deepcopy((self.deployment, self.sets, self.pods))
        for rs in self.sets:
            uid = rs["metadata"]["uid"]
            plan = plan_pods(rs, self.pods[uid])
            self.pods[uid] = [pod for pod in self.pods[uid] if pod not in plan.delete]
            for _ in range(plan.create):
                self._count += 1
                pod = new_pod(rs)
                pod["metadata"] |= {"uid": f"p{self._count}", "creationTimestamp": timestamp(self.now + self._count)}
                self.pods[uid].append(pod)
            rs["status"] = replica_set_status(rs, self.pods[uid], self.now, None)
        plan = plan_rollout(self.deployment, self.sets)
        for action in plan.actions:
            self._apply(action)
        if plan.revision:
            self.deployment["metadata"].setdefault("annotations", {})[REVISION] = plan.revision
        self.deployment["status"] = deployment_status(self.deployment, self.sets, self.now)
        return before != (self.deployment, self.sets, self.pods)

    def _apply(self, action: Any) -> None:
        by_name = {rs["metadata"]["name"]: rs for rs in self.sets}
        match action:
            case CreateReplicaSet(manifest):
                assert manifest["metadata"]["name"] not in by_name
                self._count += 1
                manifest = copy.deepcopy(manifest) | {"apiVersion": "apps/v1", "kind": "ReplicaSet"}
                manifest["metadata"] |= {"uid": f"rs{self._count}", "creationTimestamp": timestamp(self.now + self._count)}
                self.sets.append(manifest)
                self.pods[manifest["metadata"]["uid"]] = []
            case ScaleReplicaSet(name, replicas):
                by_name[name]["spec"]["replicas"] = replicas
            case AnnotateReplicaSet(name, revision):
                by_name[name]["metadata"]["annotations"][REVISION] = revision
            case DeleteReplicaSet(name):
                gone = by_name[name]
                assert not self.pods.pop(gone["metadata"]["uid"]), "a ReplicaSet with pods was forgotten"
                self.sets.remove(gone)

    def settle(self, *, become_ready: bool = True, rounds: int = 200) -> None:
        for _ in range(rounds):
            changed = self.round()
            for pod in self.all_pods() if become_ready else ():
                if (condition(pod, "Ready") or {}).get("status") != "True":
                    self.set_ready(pod, True)
                    changed = True
            if not changed:
                return
        raise AssertionError("the controllers never came to rest")


def edit(world: World, version: str) -> None:
    world.deployment["spec"]["template"]["spec"]["containers"][0]["image"] = version
    world.deployment["metadata"]["generation"] += 1


surge = st.one_of(st.integers(0, 4), st.sampled_from(["0%", "25%", "50%", "100%"]))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), replicas=st.integers(0, 7), max_surge=surge, max_unavailable=surge)
def test_bounds_hold_under_random_readiness_and_edits_and_the_rollout_ends(data, replicas, max_surge, max_unavailable):
    rolling = {"rollingUpdate": {"maxSurge": max_surge, "maxUnavailable": max_unavailable}}
    world = World(deployment(replicas, strategy=rolling, revisionHistoryLimit=2))
    world.settle()
    limits = limits_of(world.deployment)
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            edit(world, data.draw(st.sampled_from(["v1", "v2", "v3"])))
        ready_before = world.available()
        world.round()
        assert sum(rs["spec"]["replicas"] for rs in world.sets) <= replicas + limits.max_surge
        # the controllers never take an available pod away that the minimum needs
        assert world.available() >= min(ready_before, limits.min_available)
        for pod in world.all_pods():
            if data.draw(st.booleans()):
                world.set_ready(pod, True)
    world.settle()
    current = find_current(world.deployment, world.sets)
    assert current is not None and len(world.pods[current["metadata"]["uid"]]) == replicas == len(world.all_pods())
    assert len(world.sets) <= 3
    progressing = condition(world.deployment, "Progressing")
    assert progressing is not None and progressing["reason"] == "NewReplicaSetAvailable"


def test_recreate_waits_until_the_old_pods_are_gone():
    world = World(deployment(2, strategy={"type": "Recreate"}))
    world.settle()
    edit(world, "v2")
    world.round()
    assert [rs["spec"]["replicas"] for rs in world.sets] == [0]
    world.settle()
    assert [rs["spec"]["replicas"] for rs in world.sets] == [0, 2]


def test_paused_deployment_scales_but_does_not_roll():
    world = World(deployment(2))
    world.settle()
    world.deployment["spec"] |= {"paused": True, "replicas": 4}
    edit(world, "v2")
    world.settle()
    assert [rs["spec"]["replicas"] for rs in world.sets] == [4]
    assert condition(world.deployment, "Progressing")["reason"] == "DeploymentPaused"


def test_rollback_uses_the_old_replica_set_again_under_a_new_revision():
    world = World(deployment(1))
    world.settle()
    edit(world, "v2")
    world.settle()
    edit(world, "v1")
    world.settle()
    assert len(world.sets) == 2
    current = find_current(world.deployment, world.sets)
    assert current["metadata"]["annotations"][REVISION] == "3" == world.deployment["metadata"]["annotations"][REVISION]


def test_scale_down_takes_the_pods_that_are_worth_least():
    world = World(deployment(3))
    world.settle()
    victim = world.all_pods()[0]
    world.set_ready(victim, False)
    world.deployment["spec"]["replicas"] = 2
    world.settle(become_ready=False)
    assert victim not in world.all_pods() and len(world.all_pods()) == 2


def test_a_stuck_rollout_exceeds_its_deadline_once_and_recovers():
    world = World(deployment(1, progressDeadlineSeconds=60))
    world.settle()
    edit(world, "broken")
    world.settle(become_ready=False)
    deadline = progress_deadline(world.deployment)
    assert deadline == NOW + 60
    world.now = deadline
    world.round()
    assert condition(world.deployment, "Progressing")["reason"] == "ProgressDeadlineExceeded"
    assert condition(world.deployment, "Available")["status"] == "True", "the old pod still serves"
    assert progress_deadline(world.deployment) is None
    world.settle()
    assert condition(world.deployment, "Progressing")["reason"] == "NewReplicaSetAvailable"


def test_min_ready_seconds_defers_availability():
    world = World(deployment(1, minReadySeconds=30))
    world.round()
    world.round()
    (pod,) = world.all_pods()
    world.set_ready(pod, True)
    world.round()
    (replica_set,) = world.sets
    assert (replica_set["status"]["readyReplicas"], replica_set["status"]["availableReplicas"]) == (1, 0)
    assert next_available(replica_set, [pod], world.now) == NOW + 30
    world.now += 30
    world.round()
    assert replica_set["status"]["availableReplicas"] == 1


def test_a_pod_that_is_refused_shows_on_the_deployment():
    world = World(deployment(1))
    world.round()
    (replica_set,) = world.sets
    replica_set["status"] = replica_set_status(replica_set, [], NOW, 'pods "x" is forbidden: exceeded quota')
    status = deployment_status(world.deployment, world.sets, NOW)
    failure = next(c for c in status["conditions"] if c["type"] == "ReplicaFailure")
    assert failure["reason"] == "FailedCreate" and "exceeded quota" in failure["message"]


@pytest.mark.parametrize(
    ("rolling", "replicas", "expected"),
    [
        ({}, 4, (1, 1)),
        ({"maxSurge": "25%", "maxUnavailable": "25%"}, 3, (1, 0)),
        ({"maxSurge": 0, "maxUnavailable": "10%"}, 3, (0, 1)),
        ({"maxSurge": 1, "maxUnavailable": 9}, 3, (1, 3)),
    ],
)
def test_limits_round_as_kubernetes_rounds(rolling, replicas, expected):
    limits = limits_of(deployment(replicas, strategy={"rollingUpdate": rolling}))
    assert (limits.max_surge, limits.max_unavailable) == expected


def test_template_hash_depends_on_content_not_on_order_and_avoids_collisions():
    left, right = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert template_hash(left) == template_hash(right) != template_hash(left, 1)
    assert len(template_hash(left)) == 10 and template_hash(left).isalnum()


def test_a_deleted_replica_set_keeps_its_pods_to_the_garbage_collector():
    world = World(deployment(2))
    world.settle()
    (replica_set,) = world.sets
    replica_set["metadata"]["deletionTimestamp"] = timestamp(NOW)
    assert plan_pods(replica_set, []).create == 0
