"""The defaults that the real server gives to built-in kinds, for the fields that controllers and clients read."""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from typing import Any

from paceline_local.apiserver.objects import Json

__all__ = ["apply_defaults", "initial_status"]

_ROLLING = {"maxUnavailable": "25%", "maxSurge": "25%"}
_DEPLOYMENT = {"replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600}
_POD = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "terminationGracePeriodSeconds": 30,
    "securityContext": {},
}
_CONTAINER = {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File", "resources": {}}
_PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_SERVICE = {"type": "ClusterIP", "sessionAffinity": "None"}
_VOLUME_MODES = ("configMap", "secret", "downwardAPI", "projected")


def apply_defaults(kind: str, obj: Json) -> Json:
    """Return `obj` (of a built-in kind) with its defaults; the given object isn't changed."""
    fill = _FILLERS.get(kind)
    if fill is None:
        return obj
    new = copy.deepcopy(obj)
    fill(new)
    return new


def initial_status(kind: str) -> Json | None:
    """Return the status that a new object of `kind` gets whatever the client sent, None if it has none."""
    return copy.deepcopy(_STATUS.get(kind))


def _fill(target: Json, defaults: Mapping[str, Any]) -> None:
    for name, value in defaults.items():
        if name not in target:
            target[name] = copy.deepcopy(value)


def _deployment(obj: Json) -> None:
    spec = obj.setdefault("spec", {})
    _fill(spec, _DEPLOYMENT)
    strategy = spec.setdefault("strategy", {})
    _fill(strategy, {"type": "RollingUpdate"})
    if strategy["type"] == "RollingUpdate":
        _fill(strategy.setdefault("rollingUpdate", {}), _ROLLING)
    _template(spec)


def _replica_set(obj: Json) -> None:
    spec = obj.setdefault("spec", {})
    _fill(spec, {"replicas": 1})
    _template(spec)


def _template(spec: Json) -> None:
    if isinstance(spec.get("template"), dict):
        _pod_spec(spec["template"].setdefault("spec", {}))


def _pod(obj: Json) -> None:
    """Fill a Pod; two defaults aren't given to templates."""
    spec = obj.setdefault("spec", {})
    _pod_spec(spec)
    _fill(spec, {"enableServiceLinks": True})
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        limits = container["resources"].get("limits") or {}
        if limits:  # a limit without a request requests the limit
            _fill(container["resources"].setdefault("requests", {}), limits)


def _pod_spec(spec: Json) -> None:
    _fill(spec, _POD)
    if "serviceAccountName" in spec:
        _fill(spec, {"serviceAccount": spec["serviceAccountName"]})
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        _container(container)
    for volume in spec.get("volumes") or []:
        for source in _VOLUME_MODES:
            if isinstance(volume.get(source), dict):
                _fill(volume[source], {"defaultMode": 420})  # 0644


def _container(container: Json) -> None:
    image = str(container.get("image", ""))
    latest = ":" not in image.rpartition("/")[2] or image.endswith(":latest")
    _fill(container, {**_CONTAINER, "imagePullPolicy": "Always" if latest and "@" not in image else "IfNotPresent"})
    for port in container.get("ports") or []:
        _fill(port, {"protocol": "TCP"})
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if probe in container:
            _fill(container[probe], _PROBE)
            if "httpGet" in container[probe]:
                _fill(container[probe]["httpGet"], {"path": "/", "scheme": "HTTP"})
    for variable in container.get("env") or []:
        reference = (variable.get("valueFrom") or {}).get("fieldRef")
        if reference is not None:
            _fill(reference, {"apiVersion": "v1"})


def _service(obj: Json) -> None:
    spec = obj.setdefault("spec", {})
    _fill(spec, _SERVICE)
    for port in spec.get("ports") or []:
        _fill(port, {"protocol": "TCP", "targetPort": port.get("port")})


def _secret(obj: Json) -> None:
    _fill(obj, {"type": "Opaque"})
    plain = obj.pop("stringData", None) or {}
    if plain:
        encoded = {name: base64.b64encode(str(value).encode()).decode() for name, value in plain.items()}
        obj["data"] = {**(obj.get("data") or {}), **encoded}


def _namespace(obj: Json) -> None:
    _fill(obj.setdefault("spec", {}), {"finalizers": ["kubernetes"]})


def _crd(obj: Json) -> None:
    spec = obj.get("spec") or {}
    names = spec.get("names") or {}
    kind = str(names.get("kind", ""))
    _fill(names, {"listKind": f"{kind}List", "singular": kind.lower()})
    _fill(spec, {"conversion": {"strategy": "None"}})


_FILLERS = {
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "Pod": _pod,
    "Service": _service,
    "Secret": _secret,
    "Namespace": _namespace,
    "CustomResourceDefinition": _crd,
}
_STATUS: Mapping[str, Json] = {
    "Deployment": {},
    "ReplicaSet": {"replicas": 0},
    "Pod": {"phase": "Pending", "qosClass": "BestEffort"},
    "Service": {"loadBalancer": {}},
    "Namespace": {"phase": "Active"},
    "PodDisruptionBudget": {"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0},
    "HorizontalPodAutoscaler": {"currentReplicas": 0, "desiredReplicas": 0},
}
