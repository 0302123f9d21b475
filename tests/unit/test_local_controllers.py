"""The controllers' rounds against an API server in miniature: one object's trouble doesn't become everybody's."""

from __future__ import annotations

import copy

import pytest

from paceline_local.client import Listing
from paceline_local.controllers import Controllers
from paceline_local.errors import ApiError
from paceline_local.resources import DEPLOYMENTS, PODS, REPLICA_SETS


class Server:
    """Keeps objects by kind and name, and refuses what `refuse` says."""

    def __init__(self, *deployments, refuse=lambda resource, body: None):
        self.objects = {DEPLOYMENTS: {}, REPLICA_SETS: {}, PODS: {}}
        self.refuse, self.writes = refuse, 0
        for deployment in deployments:
            self._put(DEPLOYMENTS, deployment)

    def _put(self, resource, body):
        self.writes += 1
        meta = {"uid": f"{resource.plural}-{self.writes}", "creationTimestamp": "2026-01-01T00:00:00Z"} | body["metadata"]
        stored = {"apiVersion": resource.api_version, "kind": resource.kind} | copy.deepcopy(body) | {"metadata": meta}
        self.objects[resource][meta["name"]] = stored
        return stored

    async def list(self, resource, namespace=None, *, labels=""):
        return Listing([copy.deepcopy(o) for o in self.objects[resource].values()], "1")

    async def create(self, resource, body, namespace=None):
        if body["metadata"]["name"] in self.objects[resource]:
            raise ApiError(409, "AlreadyExists", "it exists")
        if why := self.refuse(resource, body):
            raise ApiError(422, "Invalid", why)
        return self._put(resource, body)

    async def patch(self, resource, name, body, namespace=None, *, subresource=None, **_):
        self.writes += 1
        stored = self.objects[resource][name]
        for part, fields in body.items():
            stored[part] = stored.get(part, {}) | fields
        return stored

    async def delete(self, resource, name, namespace=None, **_):
        self.writes += 1
        del self.objects[resource][name]


def deployment(name, replicas=2):
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "c", "image": name}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"metadata": {"name": name, "namespace": "default", "generation": 1}, "spec": spec}


async def settle(controllers, server, rounds=20):
    for _ in range(rounds):
        before = server.writes
        await controllers.sync()
        if server.writes == before:
            return
    pytest.fail("the controllers never came to rest")


async def test_a_deployment_becomes_pods_and_then_causes_no_writes():
    server = Server(deployment("web"))
    await settle(Controllers(server), server)
    (replica_set,) = server.objects[REPLICA_SETS].values()
    assert len(server.objects[PODS]) == 2
    for pod in server.objects[PODS].values():
        assert pod["metadata"]["labels"]["pod-template-hash"] == replica_set["metadata"]["labels"]["pod-template-hash"]
        assert pod["metadata"]["ownerReferences"][0]["uid"] == replica_set["metadata"]["uid"]
    assert server.objects[DEPLOYMENTS]["web"]["status"]["replicas"] == 2


async def test_refused_objects_do_not_stop_the_others():
    def refuse(resource, body):
        bad = body["metadata"]["labels"]["app"] == "bad" and resource == REPLICA_SETS
        quota = body["metadata"]["labels"]["app"] == "quota" and resource == PODS
        return "spec.template is invalid" if bad else "exceeded quota" if quota else None

    server = Server(deployment("bad"), deployment("quota"), deployment("web"), refuse=refuse)
    controllers = Controllers(server)
    await settle(controllers, server)
    assert sorted(p["metadata"]["labels"]["app"] for p in server.objects[PODS].values()) == ["web", "web"]
    conditions = {c["type"]: c for c in server.objects[DEPLOYMENTS]["quota"]["status"]["conditions"]}
    assert conditions["ReplicaFailure"]["message"] == "exceeded quota"


async def test_a_taken_name_is_avoided_by_another_hash():
    server = Server(deployment("web"))
    controllers = Controllers(server)
    await controllers.sync()
    (taken,) = server.objects[REPLICA_SETS].values()
    taken["metadata"] |= {"ownerReferences": [], "labels": {}}  # now it is somebody else's
    await settle(controllers, server)
    assert server.objects[DEPLOYMENTS]["web"]["status"]["collisionCount"] == 1
    assert len(server.objects[REPLICA_SETS]) == 2


async def test_scaling_down_deletes_pods():
    server = Server(deployment("web", 3))
    controllers = Controllers(server)
    await settle(controllers, server)
    server.objects[DEPLOYMENTS]["web"]["spec"]["replicas"] = 1
    await settle(controllers, server)
    assert len(server.objects[PODS]) == 1


async def test_nonsense_in_a_deployment_ends_neither_the_others_nor_the_agent_and_is_tried_ever_less_often(monkeypatch):
    odd = deployment("odd")
    odd["spec"]["strategy"] = {"rollingUpdate": {"maxSurge": "lots"}}
    server = Server(odd, deployment("web"))
    controllers, waits = Controllers(server), []
    monkeypatch.setattr("paceline_local.controllers.time.time", lambda: 1000.0)
    monkeypatch.setattr(controllers, "_wake", lambda when: waits.append(when - 1000.0) if when else None)
    for _ in range(9):
        await controllers.sync()
    assert [p["metadata"]["labels"]["app"] for p in server.objects[PODS].values()] == ["web", "web"]
    assert [wait for wait in waits if wait <= 60] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    del server.objects[DEPLOYMENTS]["odd"]
    await controllers.sync()
    assert controllers._stuck == {}
