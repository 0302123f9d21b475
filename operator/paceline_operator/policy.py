"""What a spec may ask for: a template or an image is pod creation with the operator's rights, so both start closed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from paceline_operator.errors import Problem, SpecError
from paceline_operator.settings import Settings, TemplatePolicy
from paceline_operator.spec import Accelerator, InferenceService, ServiceSpec

__all__ = ["PRODUCT_LABELS", "RESERVED_ENV", "check_policy"]

# what the operator or the node sets: a spec that overrides them breaks the contract with the runtime
RESERVED_ENV = ("POD_NAME", "POD_NAMESPACE", "POD_IP", "PACELINE_CPU_LIMIT", "PACELINE_MEMORY_LIMIT", "PACELINE_HOST")
# node labels of the vendors' feature discovery
PRODUCT_LABELS = {
    "nvidia.com": "nvidia.com/gpu.product",
    "amd.com": "amd.com/gpu.product-name",
    "gpu.intel.com": "gpu.intel.com/product",
}
_VOLUMES = {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret", "ephemeral"}
_POD_FIELDS = {
    "affinity", "containers", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostAliases", "imagePullSecrets",
    "initContainers", "nodeSelector", "preemptionPolicy", "priorityClassName", "runtimeClassName", "schedulerName",
    "schedulingGates", "securityContext", "serviceAccountName", "terminationGracePeriodSeconds", "tolerations",
    "topologySpreadConstraints", "volumes",
}  # fmt: skip
_SAFE_CAPABILITIES = {"NET_BIND_SERVICE"}  # what the restricted pod security standard lets a container add
_PVC_URI = re.compile(r"pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?/.+")


def check_policy(service: InferenceService, settings: Settings) -> None:
    """Raise `SpecError` with everything in the spec that `settings` don't allow."""
    problems = tuple(_problems(service.spec, settings))
    if problems:
        raise SpecError(problems)


def _problems(spec: ServiceSpec, settings: Settings) -> Iterator[Problem]:
    yield from _uri_problems(spec.model.uri, settings)
    if spec.image is not None:
        yield from _image_problems("spec.image", spec.image, settings)
    for i, variable in enumerate(spec.env):
        if variable.name in RESERVED_ENV:
            yield Problem(f"spec.env[{i}].name", variable.name, "set by the operator", "use another name")
    if spec.accelerator is not None:
        yield from _product_problems(spec.accelerator)
    if spec.template is not None:
        yield from _template_problems(spec.template, settings)


def _uri_problems(uri: str, settings: Settings) -> Iterator[Problem]:
    scheme, _, rest = uri.partition("://")
    if scheme not in settings.allowed_model_schemes:
        allowed = ", ".join(f"{s}://" for s in settings.allowed_model_schemes)
        yield Problem(
            "spec.model.uri", uri, f"scheme {scheme} isn't allowed", f"use {allowed} or ask whoever runs the operator"
        )
    if ".." in rest.split("/"):
        yield Problem("spec.model.uri", uri, "no '..' in the path", "name the file by its full path")
    if scheme == "pvc" and not _PVC_URI.fullmatch(uri):
        yield Problem("spec.model.uri", uri, "pvc://claim/path", "name the claim and a path inside it")


def _image_problems(path: str, image: str, settings: Settings) -> Iterator[Problem]:
    if image != settings.runtime_image and not any(fnmatchcase(image, p) for p in settings.allowed_images):
        remedy = "leave it out, or ask whoever runs the operator to add it to PACELINE_ALLOWED_IMAGES"
        yield Problem(path, image, "image isn't allowed", remedy)


def _product_problems(accelerator: Accelerator) -> Iterator[Problem]:
    vendor = accelerator.resource.partition("/")[0]
    if accelerator.product is not None and vendor not in PRODUCT_LABELS:
        remedy = "leave it out and choose nodes by nodeSelector"
        yield Problem("spec.accelerator.product", accelerator.product, f"unknown for {accelerator.resource}", remedy)


def _template_problems(template: Mapping[str, Any], settings: Settings) -> Iterator[Problem]:
    if settings.template_policy is TemplatePolicy.NONE:
        remedy = "remove it, or ask whoever runs the operator to set PACELINE_ALLOW_TEMPLATE"
        yield Problem("spec.template", "…", "templates aren't allowed", remedy)
        return
    shapes = {key: _or_empty(template.get(key)) for key in ("spec", "metadata")}
    if isinstance(shapes["metadata"], Mapping):
        shapes |= {f"metadata.{key}": _or_empty(shapes["metadata"].get(key)) for key in ("labels", "annotations")}
    wrong = {key: value for key, value in shapes.items() if not isinstance(value, Mapping)}
    yield from (Problem(f"spec.template.{key}", value, "an object", "write an object") for key, value in wrong.items())
    if not wrong and settings.template_policy is TemplatePolicy.RESTRICTED:
        yield from _restricted_problems(shapes["spec"], settings)
        yield from _annotation_problems(shapes["metadata.annotations"])


def _or_empty(value: Any) -> Any:
    return {} if value is None else value


def _annotation_problems(annotations: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in annotations.items():
        if _UNCONFINING.fullmatch(key):
            yield _refused(f"spec.template.metadata.annotations[{key}]", value)


def _refused(path: str, value: Any) -> Problem:
    return Problem(path, value, "not allowed in a restricted template", "remove it")


def _restricted_problems(pod: Mapping[str, Any], settings: Settings) -> Iterator[Problem]:
    """Yield what reaches beyond the pod; a list of what is allowed, so that a field of a later Kubernetes is refused."""
    path = "spec.template.spec"
    yield from (_refused(f"{path}.{key}", value) for key, value in pod.items() if key not in _POD_FIELDS)
    account = pod.get("serviceAccountName")
    if account is not None and account not in settings.allowed_service_accounts:
        yield _refused(f"{path}.serviceAccountName", account)
    yield from _security_problems(path, pod)
    for i, volume in enumerate(_objects(pod.get("volumes"))):
        if set(volume) - {"name"} - _VOLUMES:
            yield _refused(f"{path}.volumes[{i}]", volume)
        if "serviceAccountToken" in str(volume.get("projected", "")):
            yield _refused(f"{path}.volumes[{i}].projected", "serviceAccountToken")
    for kind in ("containers", "initContainers"):
        for i, container in enumerate(_objects(pod.get(kind))):
            yield from _container_problems(f"{path}.{kind}[{i}]", container, settings)


def _container_problems(path: str, container: Mapping[str, Any], settings: Settings) -> Iterator[Problem]:
    if "image" in container:
        yield from _image_problems(f"{path}.image", str(container["image"]), settings)
    yield from _security_problems(path, container)
    for i, port in enumerate(_objects(container.get("ports"))):
        if port.get("hostPort"):
            yield _refused(f"{path}.ports[{i}].hostPort", port["hostPort"])


def _security_problems(path: str, owner: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what loosens the security context of `owner` (a pod spec or a container); a null would remove ours."""
    if "securityContext" not in owner:
        return
    context = owner["securityContext"]
    if not isinstance(context, Mapping):
        yield _refused(f"{path}.securityContext", context)
        return
    for key, value in context.items():
        if not _is_tight(key, value):
            yield _refused(f"{path}.securityContext.{key}", value)


def _is_tight(key: str, value: Any) -> bool:
    if key == "capabilities":
        return (
            isinstance(value, Mapping)
            and value.get("drop", ["ALL"]) == ["ALL"]
            and set(value.get("add") or ()) <= _SAFE_CAPABILITIES
        )
    if key == "seccompProfile":
        return isinstance(value, Mapping) and value.get("type", "RuntimeDefault") == "RuntimeDefault"
    if key in _USER_IDS:  # null: the platform assigns one, as OpenShift does
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
    return key in _FREE_CONTEXT or _TIGHT.get(key) is value


_USER_IDS = {"fsGroup", "runAsGroup", "runAsUser"}
_FREE_CONTEXT = {"fsGroupChangePolicy", "readOnlyRootFilesystem"}
_TIGHT = {"allowPrivilegeEscalation": False, "privileged": False, "runAsNonRoot": True}
# annotations that switch a container's confinement off on older servers
_UNCONFINING = re.compile(r"(container\.)?(apparmor|seccomp)\.security\.(alpha|beta)\.kubernetes\.io/.*")


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
