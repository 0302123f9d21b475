"""Every child of an InferenceService as data: pure, so that what a manifest becomes is read and tested without a cluster."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator

from paceline_core.durations import parse_duration
from paceline_core.knobs import knobs_to_wire
from paceline_operator.api_kinds import Apis
from paceline_operator.children import Manifest, child_of, stamped
from paceline_operator.children_cache import cache_children
from paceline_operator.children_monitoring import monitoring_children
from paceline_operator.children_network import network_children, service_content
from paceline_operator.children_scaling import disruption_budget, scaling_children
from paceline_operator.effective import KNOBS_FILE, spec_hash
from paceline_operator.names import ADMIN_STAMP, APPLIED, GROUP, admin_token, base_name, selector
from paceline_operator.pod import HTTP_PORT, pod_template
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService
from paceline_operator.spec_platform import Rollout
from paceline_operator.upgrade import notes

__all__ = ["knobs_document", "missing_kinds", "render", "service_url"]

# a Secret's type can't be changed, so applying ours onto somebody else's Secret of that name fails without our reading it
SECRET_TYPE = f"{GROUP}/admin-token"
_MIN_READY = 5  # seconds that a new pod must stay ready before an old one goes: one that falls over at once stops a rollout
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_HISTORY = 3  # old ReplicaSets kept for a rollback


def render(
    service: InferenceService, settings: Settings, apis: Apis, *, upgrade: str = "", salts: tuple[str, ...] = ("",)
) -> tuple[Manifest, ...]:
    """Return the service's children in the order in which they have to exist; those that the server doesn't have are left
    out. `upgrade` is the value of the service's upgrade annotation, `salts` those of the admin tokens that count.

    Each is a whole apply configuration: a field that is left out here is given up.
    """
    base = base_name(service.name)
    secret = stamped(child_of(service, "v1", "Secret", _secret(service, settings, salts), f"{base}-admin"))
    knobs = {"data": {KNOBS_FILE: knobs_document(service)}}
    others = [
        child_of(service, "v1", "ServiceAccount", {"automountServiceAccountToken": False}),
        child_of(service, "v1", "ConfigMap", knobs, f"{base}-knobs"),
        child_of(service, "v1", "Service", service_content(service)),
    ]
    for kind, content in _wanted(service, settings, apis):
        if kind in apis:
            others.append(_labelled(child_of(service, apis[kind], kind, content), service))
    deployment = _labelled(child_of(service, "apps/v1", "Deployment", _deployment(service, settings)), service)
    for kind, name, content in cache_children(service, deployment["spec"]["template"]):
        if kind in apis:
            others.append(child_of(service, apis[kind], kind, content, name))
    marks = {ADMIN_STAMP: secret["metadata"]["annotations"][APPLIED]}
    marks |= notes(service, deployment["spec"]["template"], upgrade)
    return (secret, *map(stamped, others), stamped(deployment, marks))


def missing_kinds(service: InferenceService, settings: Settings, apis: Apis) -> list[str]:
    """Return the kinds that the spec asks for and the server doesn't have."""
    asked = {kind for kind, _ in _wanted(service, settings, apis)} - {"PodDisruptionBudget", "NetworkPolicy"}
    asked |= {"Job"} if service.spec.cache and service.spec.cache.preload else set()
    return sorted(kind for kind in asked if kind not in apis)


def _wanted(service: InferenceService, settings: Settings, apis: Apis) -> Iterator[tuple[str, Manifest]]:
    """Yield kind and content of the children that depend on spec and server."""
    yield "PodDisruptionBudget", disruption_budget(service)
    yield from network_children(service, settings, apis)
    yield from scaling_children(service)
    yield from monitoring_children(service)


def _labelled(child: Manifest, service: InferenceService) -> Manifest:
    """Return a child with the labels that its kind may be selected by: Kueue's queue, a Prometheus's selector."""
    monitoring = service.spec.monitoring
    labels = {}
    if child["kind"] == "Deployment" and service.spec.queue_name:
        labels = {_QUEUE_LABEL: service.spec.queue_name}
    elif child["kind"] in ("PodMonitor", "PrometheusRule") and monitoring:
        labels = dict(monitoring.labels or {})
    meta = child["metadata"]
    return child | {"metadata": meta | {"labels": labels | meta["labels"]}}


def knobs_document(service: InferenceService) -> str:
    """Return the text of knobs.json: every knob, so that pods of another version agree about defaults.

    The hash tells a new pod whether the file of overrides that it reads next was made for this spec.
    """
    document = {"specHash": spec_hash(service), "knobs": knobs_to_wire(service.knobs)}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def service_url(service: InferenceService) -> str:
    """Return where clients inside the cluster reach the service."""
    return f"http://{base_name(service.name)}.{service.namespace}.svc:{HTTP_PORT}"


def _secret(service: InferenceService, settings: Settings, salts: tuple[str, ...]) -> Manifest:
    token = "\n".join(admin_token(settings.operator_key, service.uid, salt) for salt in salts)
    return {"type": SECRET_TYPE, "data": {"token": b64encode(token.encode()).decode()}}


def _deployment(service: InferenceService, settings: Settings) -> Manifest:
    rollout = service.spec.rollout or Rollout()
    spec = {
        "replicas": service.spec.replicas,
        "revisionHistoryLimit": _HISTORY,
        "progressDeadlineSeconds": int(parse_duration(rollout.progress_deadline)),
        "minReadySeconds": _MIN_READY,
        "selector": {"matchLabels": selector(service.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(service)},
        "template": pod_template(service, settings, base_name(service.name)),
    }
    return {"spec": spec}


def _rolling_update(service: InferenceService) -> Manifest:
    """Return the rollout's pace: with an accelerator every device may be taken, so a surge pod could wait for ever."""
    surge = 0 if service.spec.accelerator is not None else 1
    return {"maxSurge": surge, "maxUnavailable": 1 - surge}
