"""A small fake of the cluster module: objects by kind and name, merged as the server merges them."""

import copy
import itertools

from paceline_operator.api_kinds import OPTIONAL, Apis
from paceline_operator.errors import ApiUnavailable
from paceline_operator.names import POSTED
from paceline_operator.overlay import overlay

_PLURALS = {kind.plural for kind in OPTIONAL.values()}
ALL_APIS = Apis.of({kind.api_version(kind.versions[0]): _PLURALS for kind in OPTIONAL.values()})


class FakeCluster:
    """Records calls; `refuse` holds errors by kind or by owner's name, `normalise` may rewrite what is stored."""

    def __init__(self):
        self.objects = {}
        self.calls = []
        self.events = []
        self.refuse = {}
        self.outages = 0
        self.normalise = lambda item: item
        self.apis = ALL_APIS
        self._versions = itertools.count(100)

    def add(self, item):
        old, meta = self.objects.get((item["kind"], item["metadata"]["name"])), item["metadata"]
        if old is not None and "generation" in meta and old["spec"] != item["spec"]:
            meta["generation"] = max(meta["generation"], old["metadata"]["generation"] + 1)
        meta["resourceVersion"] = str(next(self._versions))
        self.objects[item["kind"], item["metadata"]["name"]] = item
        return copy.deepcopy(item)

    async def discover(self):
        if self.outages:
            self.outages -= 1
            raise ApiUnavailable("away")
        return False

    async def services(self, namespace):
        return await self.children("InferenceService", namespace)

    async def classes(self):
        return await self.children("InferenceClass", None)

    async def patch_class_status(self, name, version, status):
        self.calls.append(("status", f"InferenceClass {name}"))
        found = copy.deepcopy(self.objects["InferenceClass", name])
        found["status"] = overlay(found.get("status", {}), status)
        return self.add(found)

    async def children(self, kind, namespace):
        return [copy.deepcopy(item) for (found, _), item in self.objects.items() if found == kind]

    async def get(self, kind, namespace, name):
        self.calls.append(("get", kind))
        return copy.deepcopy(self.objects.get((kind, name)))

    async def merge(self, kind, namespace, name, patch):
        live = self.objects.get((kind, name))
        if live is None:
            return None
        if live["metadata"]["resourceVersion"] != patch.get("metadata", {}).get("resourceVersion"):
            raise ApiUnavailable(f"{name} has changed meanwhile")
        self.calls.append(("merge", kind))
        return self.add(overlay(live, patch))

    async def create(self, child):
        kind, name = child["kind"], child["metadata"]["name"]
        if (kind, name) in self.objects:
            self.calls.append(("create", kind))
            return None
        return await self.apply(child)

    async def claim(self, live):
        if POSTED in live["metadata"].get("annotations", {}):
            self.calls.append(("claim", live["kind"]))

    async def delete(self, live):
        self.calls.append(("delete", live["kind"]))
        self.objects.pop((live["kind"], live["metadata"]["name"]), None)

    async def apply(self, child, manager="paceline-operator"):
        kind, name = child["kind"], child["metadata"]["name"]
        self.calls.append(("apply", kind))
        owner = child["metadata"]["ownerReferences"][0]["name"]
        if error := self.refuse.get(kind) or self.refuse.get(owner):
            raise error
        merged = overlay(self.objects.get((kind, name), {}), child)
        merged["metadata"].setdefault("uid", f"uid-{kind}-{next(self._versions)}")
        return self.add(self.normalise(copy.deepcopy(merged)))

    async def patch_status(self, namespace, name, version, patch):
        parent = copy.deepcopy(self.objects["InferenceService", name])
        if parent["metadata"]["resourceVersion"] != version:
            raise ApiUnavailable(f"{name} has changed meanwhile")
        self.calls.append(("status", name))
        parent["status"] = overlay(parent.get("status", {}), patch)
        return self.add(parent)

    async def create_event(self, event):
        self.events.append(event)

    def writes(self):
        return [call for call in self.calls if call[0] != "get"]

    def status(self, name):
        return self.objects.get(("InferenceService", name), {}).get("status", {})

    def close(self):
        pass
