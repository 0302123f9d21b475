"""Names, labels and annotations of everything the operator makes."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "ADMIN_STAMP",
    "APPLIED",
    "CLASS_KIND",
    "CLASS_PLURAL",
    "CLASS_SHORT_NAME",
    "CONTAINER",
    "DEFAULT_CLASS",
    "FETCHER",
    "FIELD_MANAGER",
    "GROUP",
    "INPUTS",
    "KIND",
    "MANAGED_BY",
    "NAME_LABEL",
    "OWN",
    "PLURAL",
    "POSTED",
    "RESTART_HASH",
    "REVISION",
    "ROTATE",
    "SERVICE_LABEL",
    "SHORT_NAME",
    "TEMPLATE",
    "TOKENS",
    "TUNER_MANAGER",
    "TURN",
    "UPGRADE",
    "VERSION",
    "admin_token",
    "base_name",
    "belongs",
    "digest",
    "labels",
    "selector",
]

GROUP = "paceline.io"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
SHORT_NAME = "infsvc"
CLASS_KIND = "InferenceClass"
CLASS_PLURAL = "inferenceclasses"
CLASS_SHORT_NAME = "infclass"
DEFAULT_CLASS = "paceline.io/default-class"  # annotation, "true" on the class of services that name none
FIELD_MANAGER = "paceline-operator"
TUNER_MANAGER = "paceline-tuner"
MANAGED_BY = "app.kubernetes.io/managed-by"
SERVICE_LABEL = "paceline.io/service"
# what was applied: lets a restarted operator, and one that removes a field, see whether an object is up to date
APPLIED = "paceline.io/applied"
# on what the server took only by a POST, until it is applied for the first time (`Cluster.claim`)
POSTED = "paceline.io/posted"
# on the Deployment: hash of the Secret that was applied before it, because Secrets themselves are never read
ADMIN_STAMP = "paceline.io/admin-secret"
RESTART_HASH = "paceline.io/restart-knobs"
# on the pod template: hash of the rest of it, so that pods can be told from those of an earlier one
REVISION = "paceline.io/revision"
# on the Deployment: what spec and class ask of the pods (hash), the template that came of it, and the last upgrade done
INPUTS = "paceline.io/inputs"
TEMPLATE = "paceline.io/template"
# there too: hash of the service's own spec, without its class, and the inputs that a change of the class let it roll to
OWN = "paceline.io/own-spec"
TURN = "paceline.io/class-turn"
# on the InferenceService: any new value rolls the pods to what this version of the operator would make of the spec
UPGRADE = "paceline.io/upgrade"
# there too: any new value rotates the admin token; on the Deployment: the salts of the tokens that count
ROTATE = "paceline.io/rotate-admin-token"
TOKENS = "paceline.io/admin-tokens"
NAME_LABEL = "app.kubernetes.io/name"
CONTAINER = "runtime"  # of a pod, that serves
FETCHER = "paceline-fetch"  # the name of pods that fetch a model: no Service, budget or Deployment selects them
_LONGEST = 63  # of a Service's name and of a label's value
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def base_name(name: str) -> str:
    """Return the name of the children: the service's own if it fits a DNS label, else cut and made unique by a hash.

    InferenceServices may be called anything up to 253 characters with dots and a leading digit; Services may not.
    """
    if len(name) <= _LONGEST and _DNS_LABEL.fullmatch(name):
        return name
    suffix = "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    head = re.sub(r"[^-a-z0-9]", "-", name)
    head = head if head[0].isalpha() else f"s-{head}"
    return head[: _LONGEST - len(suffix)].rstrip("-") + suffix


def selector(name: str) -> dict[str, str]:
    """Return the labels that select a service's pods; they never change."""
    return {"app.kubernetes.io/name": "paceline-runtime", SERVICE_LABEL: base_name(name)}


def belongs(child: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Return whether an object is a child of an InferenceService, both as manifests; its label is cut as its name is."""
    of, meta = child["metadata"], service["metadata"]
    label = (of.get("labels") or {}).get(SERVICE_LABEL)
    return bool(of["namespace"] == meta["namespace"]) and label == base_name(meta["name"])


def labels(name: str) -> dict[str, str]:
    """Return the recommended labels of a child."""
    return selector(name) | {
        "app.kubernetes.io/instance": base_name(name),
        "app.kubernetes.io/component": "inference",
        "app.kubernetes.io/part-of": "paceline",
        MANAGED_BY: "paceline",
    }


def digest(data: Any, length: int = 16) -> str:
    """Return a stable hash of JSON-ready data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def admin_token(key: bytes, uid: str, salt: str = "") -> str:
    """Return the token of a service's admin ports: derived, so that the operator never has to read a Secret.

    A service that is deleted and made again has another uid and so another token; another salt rotates it.
    """
    return hmac.new(key, f"paceline-admin/{uid}/{salt}".encode(), hashlib.sha256).hexdigest()
