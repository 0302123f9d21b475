"""What a spec may ask for: a template or an image is pod creation with the operator's rights, so both start closed.

The rules are those of the service's class; what it leaves open, and services without one, go by the operator's settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from posixpath import normpath
from typing import Any

from paceline_operator.class_spec import InferenceClass
from paceline_operator.errors import Problem, SpecError
from paceline_operator.names import CONTAINER
from paceline_operator.settings import Settings, TemplatePolicy
from paceline_operator.spec import Accelerator, InferenceService

__all__ = ["PRODUCT_LABELS", "RESERVED_ENV", "Rules", "policy_problems", "rules_of"]

# what the operator or the node sets: a spec that overrides them breaks the contract with the runtime
RESERVED_ENV = ("POD_NAME", "POD_NAMESPACE", "POD_IP", "PACELINE_CPU_LIMIT", "PACELINE_MEMORY_LIMIT", "PACELINE_HOST")
# variables that send hf:// URIs to another host than the URI says; Python takes proxies in any case of letters
_REDIRECTING = re.compile(r"HF_(HUB_)?ENDPOINT|(?i:(HTTPS?|ALL)_PROXY)")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a service may ask for. `models` and `accelerators` are patterns, None: every one. `own_env` are variables that
    the class sets itself. `author` says who can change the rules."""

    author: str
    model_schemes: tuple[str, ...]
    images: tuple[str, ...]
    models: tuple[str, ...] | None = None
    accelerators: tuple[str, ...] | None = None
    service_accounts: tuple[str, ...] = ()
    host_paths: tuple[str, ...] = ()
    privileged: bool = False
    template: TemplatePolicy = TemplatePolicy.NONE
    own_env: frozenset[str] = frozenset()

    @property
    def remedy(self) -> str:
        """Whom to ask for more."""
        return f"ask whoever looks after {self.author} to allow it"


def rules_of(settings: Settings, cls: InferenceClass | None = None) -> Rules:
    """Return the rules for services of a class (None: without one)."""
    plain = Rules(
        author="the operator's settings (PACELINE_ALLOW…)",
        model_schemes=settings.allowed_model_schemes,
        images=(settings.runtime_image, *settings.allowed_images),
        service_accounts=settings.allowed_service_accounts,
        template=settings.template_policy,
    )
    return plain if cls is None else _class_rules(plain, settings, cls)


def _class_rules(plain: Rules, settings: Settings, cls: InferenceClass) -> Rules:
    allowed, defaults = cls.spec.allowed, cls.defaults
    own_images = (defaults["image"],) if "image" in defaults else ()
    images = plain.images if allowed.images is None else (settings.runtime_image, *allowed.images)
    schemes = {pattern.partition("://")[0] for pattern in allowed.models or ()}
    return Rules(
        author=f"the class {cls.name}",
        model_schemes=plain.model_schemes if allowed.models is None else tuple(sorted(schemes)),
        models=allowed.models,
        images=(*own_images, *images),
        accelerators=allowed.accelerators,
        service_accounts=plain.service_accounts if allowed.service_accounts is None else allowed.service_accounts,
        host_paths=allowed.host_paths or (),
        privileged=bool(allowed.privileged),
        template=plain.template if allowed.template is None else TemplatePolicy(allowed.template.lower()),
        own_env=frozenset(entry["name"] for entry in defaults.get("env") or ()),
    )


def check_policy(service: InferenceService, settings: Settings) -> None:
    """Raise `SpecError` with everything in the spec that `settings` don't allow."""
    if problems := tuple(policy_problems(service, rules_of(settings))):
        raise SpecError(problems)


def policy_problems(service: InferenceService, rules: Rules) -> Iterator[Problem]:
    """Yield everything in the spec that `rules` don't allow."""
    spec = service.spec
    yield from _uri_problems(spec.model.uri, rules)
    if spec.image is not None:
        yield from _image_problems("spec.image", spec.image, rules)
    yield from _env_problems("spec.env", [variable.name for variable in spec.env], rules)
    if spec.accelerator is not None:
        yield from _accelerator_problems(spec.accelerator, rules)
    if spec.cache is not None and spec.cache.node_path is not None:
        yield from _node_path_problems(spec.cache.node_path, rules)
    if spec.template is not None:
        yield from _template_problems(spec.template, rules)


def _node_path_problems(path: str, rules: Rules) -> Iterator[Problem]:
    if normpath(path) != path or not _is_below(path, rules.host_paths):
        allowed = ", ".join(rules.host_paths) or "none"
        yield Problem("spec.cache.nodePath", path, f"a plain path below one of {allowed}", f"use a claim, or {rules.remedy}")


def _env_problems(path: str, names: list[str], rules: Rules) -> Iterator[Problem]:
    for i, name in enumerate(names):
        if name in RESERVED_ENV:
            yield Problem(f"{path}[{i}].name", name, "set by the operator", "use another name")
        elif _REDIRECTING.fullmatch(name) and rules.models is not None and name not in rules.own_env:
            bound = f"{rules.author} says where models come from"
            yield Problem(f"{path}[{i}].name", name, bound, f"remove it, or {rules.remedy}")


def _uri_problems(uri: str, rules: Rules) -> Iterator[Problem]:
    scheme, _, rest = uri.partition("://")
    if scheme not in rules.model_schemes:
        allowed = ", ".join(f"{s}://" for s in rules.model_schemes)
        yield Problem("spec.model.uri", uri, f"scheme {scheme} isn't allowed", f"use {allowed} or {rules.remedy}")
    elif rules.models is not None and not _matches(uri, rules.models):
        bound = f"like one of {', '.join(rules.models) or 'none'}"
        yield Problem("spec.model.uri", uri, bound, f"use such a model, or {rules.remedy}")
    if ".." in rest.split("/"):
        yield Problem("spec.model.uri", uri, "no '..' in the path", "name the file by its full path")
    if scheme == "pvc" and not _PVC_URI.fullmatch(uri):
        yield Problem("spec.model.uri", uri, "pvc://claim/path", "name the claim and a path inside it")


def _matches(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def _image_problems(path: str, image: str, rules: Rules) -> Iterator[Problem]:
    # the first are the operator's and the class's own: never patterns, but no image's name has a * in it either
    if not _matches(image, rules.images):
        yield Problem(path, image, "image isn't allowed", f"leave it out, or {rules.remedy}")


def _accelerator_problems(accelerator: Accelerator, rules: Rules) -> Iterator[Problem]:
    allowed = rules.accelerators
    ways = (accelerator.resource, f"{accelerator.resource}={accelerator.product or ''}")
    if allowed is not None and not any(_matches(way, allowed) for way in ways):
        remedy = f"choose one of them, or {rules.remedy}"
        yield Problem("spec.accelerator", ways[1].rstrip("="), f"like one of {', '.join(allowed) or 'none'}", remedy)
    vendor = accelerator.resource.partition("/")[0]
    if accelerator.product is not None and vendor not in PRODUCT_LABELS:
        remedy = "leave it out and choose nodes by nodeSelector"
        yield Problem("spec.accelerator.product", accelerator.product, f"unknown for {accelerator.resource}", remedy)


def _template_problems(template: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    if rules.template is TemplatePolicy.NONE:
        yield Problem("spec.template", "…", "templates aren't allowed", f"remove it, or {rules.remedy}")
        return
    shapes = {key: _or_empty(template.get(key)) for key in ("spec", "metadata")}
    if isinstance(shapes["metadata"], Mapping):
        shapes |= {f"metadata.{key}": _or_empty(shapes["metadata"].get(key)) for key in ("labels", "annotations")}
    wrong = {key: value for key, value in shapes.items() if not isinstance(value, Mapping)}
    yield from (Problem(f"spec.template.{key}", value, "an object", "write an object") for key, value in wrong.items())
    if not wrong and rules.template is TemplatePolicy.RESTRICTED:
        yield from _restricted_problems(shapes["spec"], rules)
        yield from _annotation_problems(shapes["metadata.annotations"])


def _or_empty(value: Any) -> Any:
    return {} if value is None else value


def _annotation_problems(annotations: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in annotations.items():
        if _UNCONFINING.fullmatch(key):
            yield _refused(f"spec.template.metadata.annotations[{key}]", value)


def _refused(path: str, value: Any) -> Problem:
    return Problem(path, value, "not allowed in a restricted template", "remove it")


def _restricted_problems(pod: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    """Yield what reaches beyond the pod; a list of what is allowed, so that a field of a later Kubernetes is refused."""
    path = "spec.template.spec"
    yield from (_refused(f"{path}.{key}", value) for key, value in pod.items() if key not in _POD_FIELDS)
    account = pod.get("serviceAccountName")
    if account is not None and account not in rules.service_accounts:
        yield _refused(f"{path}.serviceAccountName", account)
    yield from () if rules.privileged else _security_problems(path, pod)
    for i, volume in enumerate(_objects(pod.get("volumes"))):
        if set(volume) - {"name"} - _VOLUMES and not _is_allowed_host_path(volume, rules):
            yield _refused(f"{path}.volumes[{i}]", volume)
        if "serviceAccountToken" in str(volume.get("projected", "")):
            yield _refused(f"{path}.volumes[{i}].projected", "serviceAccountToken")
    hosts = frozenset(str(volume["name"]) for volume in _objects(pod.get("volumes")) if "hostPath" in volume)
    for kind in ("containers", "initContainers"):
        for i, container in enumerate(_objects(pod.get(kind))):
            yield from _container_problems(f"{path}.{kind}[{i}]", container, rules, hosts)


def _is_allowed_host_path(volume: Mapping[str, Any], rules: Rules) -> bool:
    path = _host_path(volume)
    return path is not None and _is_below(path, rules.host_paths)


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _host_path(volume: Mapping[str, Any]) -> str | None:
    """Return the folder that a volume is, None if it is anything but one plain host path."""
    source = volume.get("hostPath")
    path = source.get("path") if isinstance(source, Mapping) and set(volume) == {"name", "hostPath"} else None
    return path if isinstance(path, str) and path == normpath(path) and ".." not in path.split("/") else None


def _container_problems(path: str, container: Mapping[str, Any], rules: Rules, hosts: frozenset[str]) -> Iterator[Problem]:
    if "image" in container:
        yield from _image_problems(f"{path}.image", str(container["image"]), rules)
    yield from () if rules.privileged else _security_problems(path, container)
    names = [str(variable.get("name")) for variable in _objects(container.get("env"))]
    yield from _env_problems(f"{path}.env", names, rules)
    if rules.models is not None and container.get("name") == CONTAINER:
        # another command line, or variables that nobody can see here, could serve any model
        yield from (_refused(f"{path}.{key}", container[key]) for key in ("args", "command", "envFrom") if key in container)
    for i, mount in enumerate(_objects(container.get("volumeMounts"))):
        if mount.get("name") in hosts and mount.get("readOnly") is not True:
            yield Problem(f"{path}.volumeMounts[{i}]", mount.get("name"), "a folder of the node", "set readOnly: true")
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
