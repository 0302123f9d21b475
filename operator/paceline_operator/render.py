"""Every child of an InferenceService as data: pure, so that what a manifest becomes is read and tested without a cluster."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

from paceline_core.knobs import knobs_to_wire
from paceline_operator.effective import KNOBS_FILE, spec_hash
from paceline_operator.names import (
    ADMIN_STAMP,
    APPLIED,
    GROUP,
    KIND,
    VERSION,
    admin_token,
    base_name,
    digest,
    labels,
    selector,
)
from paceline_operator.pod import HTTP_PORT, pod_template
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService

__all__ = ["Manifest", "knobs_document", "owner_reference", "render", "service_url"]

Manifest = dict[str, Any]
# a Secret's type can't be changed, so applying ours onto somebody else's Secret of that name fails without our reading it
SECRET_TYPE = f"{GROUP}/admin-token"
_PROGRESS_DEADLINE = 3600  # seconds until a rollout counts as stuck: loading a large model is no failure
_HISTORY = 3  # old ReplicaSets kept for a rollback


def render(service: InferenceService, settings: Settings, *, pdb_version: str) -> tuple[Manifest, ...]:
    """Return the service's children in the order in which they have to exist. `pdb_version` is what the server serves.

    Each is a whole apply configuration: a field that is left out here is given up.
    """
    base = base_name(service.name)
    secret = _stamped(_object(service, "v1", "Secret", f"{base}-admin", _secret(service, settings)))
    deployment = _object(service, "apps/v1", "Deployment", base, {"spec": _deployment(service, settings, base)})
    others = (
        _object(service, "v1", "ServiceAccount", base, {"automountServiceAccountToken": False}),
        _object(service, "v1", "ConfigMap", f"{base}-knobs", {"data": {KNOBS_FILE: knobs_document(service)}}),
        _object(service, "v1", "Service", base, {"spec": _service(service)}),
        _object(service, pdb_version, "PodDisruptionBudget", base, {"spec": _disruption_budget(service)}),
    )
    applied = {ADMIN_STAMP: secret["metadata"]["annotations"][APPLIED]}
    return (secret, *(_stamped(child) for child in others), _stamped(deployment, applied))


def knobs_document(service: InferenceService) -> str:
    """Return the text of knobs.json: every knob, so that pods of another version agree about defaults.

    The hash tells a new pod whether the file of overrides that it reads next was made for this spec.
    """
    document = {"specHash": spec_hash(service), "knobs": knobs_to_wire(service.knobs)}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def service_url(service: InferenceService) -> str:
    """Return where clients inside the cluster reach the service."""
    return f"http://{base_name(service.name)}.{service.namespace}.svc:{HTTP_PORT}"


def owner_reference(service: InferenceService) -> Manifest:
    """Return the reference by which the cluster deletes a child together with its service."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": False,  # true would need the right to set finalizers on the service
    }


def _object(service: InferenceService, version: str, kind: str, name: str, content: Manifest) -> Manifest:
    metadata = {
        "name": name,
        "namespace": service.namespace,
        "labels": labels(service.name),
        "ownerReferences": [owner_reference(service)],
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata} | content


def _stamped(child: Manifest, annotations: Manifest | None = None) -> Manifest:
    """Return a child with its own hash: one whose stamp differs is out of date even if all our fields are there."""
    annotated = {APPLIED: digest(child), **(annotations or {})}
    return child | {"metadata": child["metadata"] | {"annotations": annotated}}


def _secret(service: InferenceService, settings: Settings) -> Manifest:
    token = admin_token(settings.operator_key, service.uid)
    return {"type": SECRET_TYPE, "data": {"token": b64encode(token.encode()).decode()}}


def _service(service: InferenceService) -> Manifest:
    port = {"name": "http", "port": HTTP_PORT, "protocol": "TCP", "targetPort": "http"}
    return {"type": "ClusterIP", "selector": selector(service.name), "ports": [port]}


def _disruption_budget(service: InferenceService) -> Manifest:
    """Return a budget of one pod at a time: a drain of nodes never takes a service down, and never hangs for good."""
    return {"maxUnavailable": 1, "selector": {"matchLabels": selector(service.name)}}


def _deployment(service: InferenceService, settings: Settings, base: str) -> Manifest:
    return {
        "replicas": service.spec.replicas,
        "revisionHistoryLimit": _HISTORY,
        "progressDeadlineSeconds": _PROGRESS_DEADLINE,
        "selector": {"matchLabels": selector(service.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(service)},
        "template": pod_template(service, settings, base),
    }


def _rolling_update(service: InferenceService) -> Manifest:
    """Return the rollout's pace: with an accelerator every device may be taken, so a surge pod could wait for ever."""
    surge = 0 if service.spec.accelerator is not None else 1
    return {"maxSurge": surge, "maxUnavailable": 1 - surge}
