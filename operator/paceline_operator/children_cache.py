"""Where downloaded models are kept, and the Job that fetches one before pods start. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline_operator.api_kinds import Apis
from paceline_operator.children import Manifest, stamped
from paceline_operator.names import APPLIED, CONTAINER, FETCHER, INPUTS, NAME_LABEL, OWN, TURN, base_name, digest, labels
from paceline_operator.outcome import Fetch, FetchState
from paceline_operator.overlay import overlay
from paceline_operator.pod import CACHE_CLAIM
from paceline_operator.policy import PRODUCT_LABELS
from paceline_operator.spec import InferenceService
from paceline_operator.upgrade import held_back, recorded

__all__ = ["cache_children", "fetch_name", "fetch_of", "has_fetch", "parked"]

_ATTEMPTS = 6  # restarts of a Job's container, after 10, 20, 40 … s
_SERVING = ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle")  # what a container that ends doesn't have
_LONGEST = 63  # of a Job's name, which its pods carry as a label


def cache_children(service: InferenceService, template: Manifest) -> Iterator[tuple[str, str, Manifest]]:
    """Yield kind, name and content of the claim and of the Job that the spec wants. `template` is the pod template."""
    cache, base = service.spec.cache, base_name(service.name)
    if cache is None:
        return
    if cache.size:
        spec = {"accessModes": [cache.access_mode], "resources": {"requests": {"storage": cache.size}}}
        spec |= {"storageClassName": cache.storage_class} if cache.storage_class else {}
        yield "PersistentVolumeClaim", f"{base}{CACHE_CLAIM}", {"spec": spec}
    if cache.preload:
        yield "Job", fetch_name(service), {"spec": {"backoffLimit": _ATTEMPTS, "template": _fetcher(service, template)}}


def fetch_name(service: InferenceService) -> str:
    """Return the name of the Job: another model is another Job, another version of the operator isn't."""
    cache, model = service.spec.cache, service.spec.model
    assert cache is not None, "a model is fetched into a cache"
    suffix = "-fetch-" + digest([model.uri, model.revision, cache.checksum, cache.claim or cache.size], 8)
    return base_name(service.name)[: _LONGEST - len(suffix)].rstrip("-") + suffix


def has_fetch(service: InferenceService, apis: Apis) -> bool:
    """Return whether a model is to be fetched before pods start, and can be."""
    return service.spec.cache is not None and service.spec.cache.preload and "Job" in apis


def fetch_of(service: InferenceService, job: Mapping[str, Any] | None) -> Fetch:
    """Return how far the Job is."""
    ended = {c["type"]: c for c in ((job or {}).get("status") or {}).get("conditions") or [] if c.get("status") == "True"}
    if "Complete" in ended:
        return Fetch(FetchState.READY)
    if "Failed" in ended:
        remedy = f"mend the cause, then delete the Job {fetch_name(service)}: another one is made"
        return Fetch(FetchState.FAILED, f"{ended['Failed'].get('message', '')}: {remedy}")
    return Fetch(FetchState.FETCHING)


def parked(deployment: Manifest, live: Mapping[str, Any] | None) -> Manifest:
    """Return the Deployment while its model is being fetched: pods of the earlier template go on serving, and there are
    none of the new one."""
    meta = deployment["metadata"]
    wanted, have = meta["annotations"], ((live or {}).get("metadata") or {}).get("annotations") or {}
    if live is not None and int(live["spec"].get("replicas") or 0) > 0:
        if have.get(INPUTS) == wanted[INPUTS]:  # its pods have this model already
            return deployment
        if kept := recorded(have):
            return held_back(deployment, kept, {name: have[name] for name in (INPUTS, OWN, TURN) if name in have})
    bare = {name: value for name, value in meta.items() if name != "annotations"}
    waiting = deployment | {"metadata": bare, "spec": deployment["spec"] | {"replicas": 0}}
    return stamped(waiting, {name: value for name, value in wanted.items() if name != APPLIED})


def _fetcher(service: InferenceService, template: Manifest) -> Manifest:
    """Return the pod of the Job: the runtime as in the template (image, mounts, environment, security), told to end."""
    marks = labels(service.name) | {NAME_LABEL: FETCHER, "app.kubernetes.io/component": "fetch"}
    pod = template["spec"]
    container = next(entry for entry in pod["containers"] if entry["name"] == CONTAINER)
    mine = {name: value for name, value in container.items() if name not in _SERVING}
    checksum = service.spec.cache.checksum if service.spec.cache else None
    mine["args"] = [*container.get("args", ()), "--fetch-only", *(["--checksum", checksum] if checksum else [])]
    mine["resources"] = _without_devices(container.get("resources") or {})
    spec = {name: value for name, value in pod.items() if name not in ("topologySpreadConstraints", "nodeSelector")}
    selector = {key: value for key, value in (pod.get("nodeSelector") or {}).items() if key not in PRODUCT_LABELS.values()}
    spec |= {"containers": [mine], "restartPolicy": "OnFailure"} | ({"nodeSelector": selector} if selector else {})
    meta = overlay({"labels": dict(template["metadata"].get("labels") or {})}, {"labels": marks})
    return {"metadata": meta, "spec": spec}


def _without_devices(resources: Mapping[str, Any]) -> Manifest:
    return {kind: {n: v for n, v in amounts.items() if "/" not in n} for kind, amounts in resources.items()}
