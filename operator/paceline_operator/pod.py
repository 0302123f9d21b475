"""The pod template of a service: how the runtime is started, what it may do, and when it counts as healthy. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline_core.durations import format_duration, parse_duration
from paceline_core.knobs import KNOBS, CostClass, KnobSpec, knobs_to_wire
from paceline_operator.fields import wire_form
from paceline_operator.names import CONTAINER, RESTART_HASH, REVISION, digest, labels, selector
from paceline_operator.overlay import overlay
from paceline_operator.policy import PRODUCT_LABELS
from paceline_operator.settings import Settings
from paceline_operator.spec import Accelerator, EnvVar, InferenceService, Toleration
from paceline_operator.spec_cache import Cache
from paceline_operator.spec_platform import Rollout

__all__ = ["ADMIN_PORT", "CACHE_CLAIM", "HTTP_PORT", "pod_template", "restart_hash", "revision_of"]

HTTP_PORT = 8000
ADMIN_PORT = 9000
_CONFIG = "/etc/paceline"
_SCRATCH = "/var/cache/paceline"
_MODELS = "/mnt/models"
_CACHE = "/var/cache/models"
CACHE_CLAIM = "-models"  # suffix of the claim that the operator makes
_DRAIN_PROPAGATION = 5  # seconds in which endpoints forget a pod that goes
_DRAIN_MARGIN = 5  # seconds that a process takes to end after the last request
_SHARED_MEMORY = 1  # GiB of /dev/shm per device: what collective operations between processes use, 64 MiB is the default
_USER = 10_001  # of the runtime image; also owns volumes, so that a read-only root is enough

_SPREAD = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_POD_SECURITY = {
    "fsGroup": _USER,
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def restart_hash(service: InferenceService) -> str:
    """Return the hash of the knobs that only a new process can take over; it changes the template, so pods roll."""
    wire = knobs_to_wire(service.knobs)
    return digest({spec.name: wire[spec.name] for spec in _restart_knobs()})


def _restart_knobs() -> list[KnobSpec]:
    return [spec for spec in KNOBS if spec.cost is CostClass.RESTART]


def pod_template(service: InferenceService, settings: Settings, base: str) -> dict[str, Any]:
    """Return the pod template, with the spec's overlay on it. `base` is the children's name."""
    own = {"metadata": {"labels": labels(service.name), "annotations": {RESTART_HASH: restart_hash(service)}}}
    overlaid = {key: value for key, value in (service.spec.template or {}).items() if value}
    template: dict[str, Any] = overlay(own | {"spec": _pod_spec(service, settings, base)}, overlaid)
    # selector and hash stay ours: a template that took another service's labels would take its traffic
    template = overlay(template, own)
    for kind in ("containers", "initContainers"):
        if isinstance(containers := template["spec"].get(kind), list):
            template["spec"][kind] = [_confined(container) for container in containers]
    template["metadata"]["annotations"][REVISION] = revision_of(template)
    return template


def revision_of(template: Mapping[str, Any]) -> str:
    """Return the hash by which pods of this template are told from those of earlier ones; its own place doesn't count."""
    rest = {name: value for name, value in template["metadata"]["annotations"].items() if name != REVISION}
    return digest({**template, "metadata": {**template["metadata"], "annotations": rest}}, 10)


def _confined(container: Any) -> Any:
    """Return a container with our security context under its own, so that a sidecar starts as tight as the runtime."""
    if not isinstance(container, Mapping):
        return container
    return {**container, "securityContext": overlay(_CONTAINER_SECURITY, container.get("securityContext") or {})}


def _pod_spec(service: InferenceService, settings: Settings, base: str) -> dict[str, Any]:
    spec = service.spec
    pod = {
        "automountServiceAccountToken": False,
        "containers": [_container(service, settings)],
        "enableServiceLinks": False,
        "securityContext": _POD_SECURITY,
        "serviceAccountName": base,
        "terminationGracePeriodSeconds": _DRAIN_PROPAGATION + math.ceil(_drain_timeout(service)) + _DRAIN_MARGIN,
        "topologySpreadConstraints": [_spread(service, key) for key in _SPREAD],
        "volumes": _volumes(service, base),
    }
    if spec.priority_class_name:
        pod["priorityClassName"] = spec.priority_class_name
    if selector := _node_selector(spec.accelerator, spec.node_selector):
        pod["nodeSelector"] = selector
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if tolerations := _tolerations(spec.accelerator, spec.tolerations):
        pod["tolerations"] = tolerations
    return pod


def _drain_timeout(service: InferenceService) -> float:
    return parse_duration((service.spec.rollout or Rollout()).drain_timeout)


def _spread(service: InferenceService, key: str) -> dict[str, Any]:
    """Prefer other nodes and zones for further pods, and don't insist: a full node is better than no pod."""
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(service.name)},
    }


def _container(service: InferenceService, settings: Settings) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": service.spec.image or settings.runtime_image,
        "command": ["paceline-runtime"],
        "args": _arguments(service),
        "env": _environment(service),
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(service),
        "volumeMounts": _mounts(service),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    } | _probes()


def _arguments(service: InferenceService) -> list[str]:
    model = service.spec.model
    arguments = ["--model", _container_uri(model.uri), "--served-model-name", service.model_name]
    for flag, value in (
        ("--revision", model.revision),
        ("--max-model-len", model.max_model_len),
        ("--quantization", model.quantization),
    ):
        arguments += [flag, str(value)] if value is not None else []
    for source in ("knobs", "tuned"):  # the later file wins: what the tuner found is on top of the spec
        arguments += ["--knobs-file", f"{_CONFIG}/{source}/knobs.json"]
    # as flags, which win over files: a mounted file may be a minute old, and nothing but another process can change these
    for spec in _restart_knobs():
        arguments += ["--" + spec.attribute.replace("_", "-"), str(spec.to_wire(getattr(service.knobs, spec.attribute)))]
    arguments += ["--admin-token-file", f"{_CONFIG}/admin/token"]
    drain = ["--drain-propagation", f"{_DRAIN_PROPAGATION}s"]
    return arguments + drain + ["--drain-timeout", format_duration(_drain_timeout(service))]


def _claim(uri: str) -> tuple[str, str] | None:
    """Return claim and path of a `pvc://` URI, else None."""
    scheme, _, rest = uri.partition("://")
    claim, _, path = rest.partition("/")
    return (claim, path) if scheme == "pvc" else None


def _container_uri(uri: str) -> str:
    """Return the URI as the container sees it: a claim is mounted, so its files are plain files there."""
    claim = _claim(uri)
    return f"file://{_MODELS}/{claim[1]}" if claim else uri


def _environment(service: InferenceService) -> list[dict[str, Any]]:
    def downward(path: str) -> dict[str, Any]:
        return {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}

    def limit(resource: str) -> dict[str, Any]:  # divisor 1: cores, rounded up, and bytes
        return {"resourceFieldRef": {"containerName": CONTAINER, "divisor": "1", "resource": resource}}

    environment: list[dict[str, Any]] = [
        {"name": "POD_NAME", "valueFrom": downward("metadata.name")},
        {"name": "POD_NAMESPACE", "valueFrom": downward("metadata.namespace")},
        {"name": "POD_IP", "valueFrom": downward("status.podIP")},
        {"name": "PACELINE_CPU_LIMIT", "valueFrom": limit("limits.cpu")},
        {"name": "PACELINE_MEMORY_LIMIT", "valueFrom": limit("limits.memory")},
        # the root is read-only; caches and sockets go to the scratch volume
        {"name": "HOME", "value": _SCRATCH},
        {"name": "TMPDIR", "value": _SCRATCH},
    ]
    if service.spec.cache:
        environment.append({"name": "HF_HOME", "value": _CACHE})
    if secret := service.spec.model.secret_ref:
        reference = {"secretKeyRef": {"name": secret.name, "key": secret.key}}
        environment.append({"name": "HF_TOKEN", "valueFrom": reference})
    return list(overlay(environment, [_variable(v) for v in service.spec.env], "env"))


def _variable(variable: EnvVar) -> dict[str, Any]:
    source = {"valueFrom": dict(variable.value_from)} if variable.value_from is not None else {"value": variable.value or ""}
    return {"name": variable.name} | source


def _resources(service: InferenceService) -> dict[str, Any]:
    """Return requests and limits; the accelerator's go into both, as Kubernetes wants it for extended resources."""
    given = service.spec.resources
    devices = {}
    if accelerator := service.spec.accelerator:
        devices = {accelerator.resource: str(accelerator.count)}
    limits = dict((given and given.limits) or {}) | devices
    requests = dict((given and given.requests) or {}) | devices
    return {kind: values for kind, values in (("limits", limits), ("requests", requests)) if values}


def _shared_memory(service: InferenceService) -> str | None:
    """Return the size of /dev/shm, None for the container runtime's default."""
    accelerator = service.spec.accelerator
    default = f"{_SHARED_MEMORY * accelerator.count}Gi" if accelerator else None
    return service.spec.shared_memory or default


def _mounts(service: InferenceService) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": f"{_CONFIG}/{name}", "readOnly": True} for name in ("admin", "knobs", "tuned")
    ]
    mounts.append({"name": "scratch", "mountPath": _SCRATCH})
    if _shared_memory(service):
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108  a mount point, not a file of ours
    if _claim(service.spec.model.uri):
        mounts.append({"name": "model", "mountPath": _MODELS, "readOnly": True})
    if service.spec.cache:
        mounts.append({"name": "models", "mountPath": _CACHE})
    return mounts


def _volumes(service: InferenceService, base: str) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "admin", "secret": {"secretName": f"{base}-admin", "defaultMode": 0o440}},
        {"name": "knobs", "configMap": {"name": f"{base}-knobs"}},
        {"name": "tuned", "configMap": {"name": f"{base}-tuned", "optional": True}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if size := _shared_memory(service):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if claim := _claim(service.spec.model.uri):
        source = {"claimName": claim[0], "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": source})
    if cache := service.spec.cache:
        volumes.append({"name": "models"} | _cache_source(cache, base))
    return volumes


def _cache_source(cache: Cache, base: str) -> dict[str, Any]:
    if cache.node_path:
        return {"hostPath": {"path": cache.node_path, "type": "DirectoryOrCreate"}}
    return {"persistentVolumeClaim": {"claimName": cache.claim or f"{base}{CACHE_CLAIM}"}}


def _probes() -> dict[str, Any]:
    """Return probes that forgive a long load and act on a hang: live is 200 from the first second, ready after loading."""

    def get(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "http", "scheme": "HTTP"}}

    return {
        "startupProbe": get("/health/live") | {"periodSeconds": 2, "failureThreshold": 60, "timeoutSeconds": 2},
        "livenessProbe": get("/health/live") | {"periodSeconds": 10, "failureThreshold": 3, "timeoutSeconds": 5},
        "readinessProbe": get("/health/ready") | {"periodSeconds": 2, "failureThreshold": 2, "timeoutSeconds": 2},
    }


def _node_selector(accelerator: Accelerator | None, given: Mapping[str, str] | None) -> dict[str, str]:
    selector = dict(given or {})
    if accelerator is not None and accelerator.product is not None:
        selector.setdefault(PRODUCT_LABELS[accelerator.resource.partition("/")[0]], accelerator.product)
    return selector


def _tolerations(accelerator: Accelerator | None, given: tuple[Toleration, ...]) -> list[dict[str, Any]]:
    """Return the spec's tolerations; nodes with accelerators are usually tainted by their resource's name."""
    tolerations = [wire_form(toleration) for toleration in given]
    if accelerator is not None:
        tolerations.append({"key": accelerator.resource, "operator": "Exists", "effect": "NoSchedule"})
    return tolerations
