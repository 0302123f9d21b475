"""A container's environment, command and arguments, as a kubelet would make them. Pure.

Mount paths don't exist on the host, so every mention of one in the command, the arguments or the values of variables is
replaced by the folder that stands for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from paceline_local.errors import ConfigMissing, LocalError
from paceline_local.manifests import Manifest

__all__ = [
    "Mounts",
    "PodFacts",
    "Sources",
    "expand",
    "field_value",
    "parse_quantity",
    "render_environment",
    "resource_value",
]

_SUFFIXES = {
    "n": "1e-9", "u": "1e-6", "m": "1e-3", "": "1", "k": "1e3", "M": "1e6", "G": "1e9",
    "T": "1e12", "P": "1e15", "E": "1e18",
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]?|[KMGTPE]i)")
_REFERENCE = re.compile(r"\$(\$|\([A-Za-z_.\-][A-Za-z0-9_.\-]*\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")

Lookup = Callable[[str], Mapping[str, str] | None]  # name of a ConfigMap or Secret → its data, None if it isn't there


@dataclass(frozen=True, slots=True)
class Sources:
    """ConfigMaps and Secrets of the pod's namespace; Secrets already decoded to text."""

    config_map: Lookup
    secret: Lookup


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What the downward API can tell: the pod's object, its address, and what the node has (`cpu`, `memory`)."""

    pod: Manifest
    pod_ip: str
    host_ip: str
    node_name: str
    allocatable: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Mounts:
    """Mount path → the host path that stands for it."""

    paths: Mapping[str, str]

    def rewrite(self, text: str) -> str:
        """Replace each mount path in a text, where it is a whole path or the beginning of one."""
        for path in sorted(self.paths, key=len, reverse=True):
            # `/data/models` isn't a mention of `/models`, and `/models-old` isn't one either; `file:///models/x` is
            pattern = rf"(?<![\w.\-]){re.escape(path.rstrip('/'))}(?=$|/|[^\w.\-/])"
            text = re.sub(pattern, self.paths[path].replace("\\", r"\\"), text)
        return text


def parse_quantity(text: str) -> Decimal:
    """Return the number that a Kubernetes quantity stands for (`500m` → 0.5, `1Gi` → 1073741824)."""
    match = _QUANTITY.fullmatch(str(text).strip())
    try:
        assert match is not None
        return Decimal(match[1]) * Decimal(str(_SUFFIXES[match[2]]))
    except (AssertionError, KeyError, InvalidOperation) as error:
        raise LocalError(f"{text!r} is not a quantity such as '500m' or '4Gi'") from error


def field_value(facts: PodFacts, path: str) -> str:
    """Return what a `fieldRef` names. Raises `ConfigMissing` for a field that the downward API doesn't have."""
    meta, spec = facts.pod["metadata"], facts.pod["spec"]
    subscript = _SUBSCRIPT.fullmatch(path)
    if subscript:
        return str((meta.get(subscript[1]) or {}).get(subscript[2], ""))
    if path in {"metadata.labels", "metadata.annotations"}:
        entries = meta.get(path.removeprefix("metadata.")) or {}
        return "\n".join(f'{key}="{_quoted(value)}"' for key, value in sorted(entries.items()))
    values = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": facts.node_name,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.hostIP": facts.host_ip,
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
    }
    if path not in values:
        raise ConfigMissing(f"fieldRef {path!r} isn't a field of the downward API")
    return str(values[path])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resource_value(facts: PodFacts, container: Manifest, reference: Manifest) -> str:
    """Return what a `resourceFieldRef` names, in units of its divisor, rounded up. Without a limit: what the node has."""
    kind, _, name = reference["resource"].partition(".")
    wanted = (container.get("resources") or {}).get(kind) or {}
    amount = wanted.get(name) or (facts.allocatable.get(name) if kind == "limits" else "0") or "0"
    divisor = parse_quantity(reference.get("divisor") or "1") or Decimal(1)
    return str(math.ceil(parse_quantity(amount) / divisor))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)`; unknown names stay as they are, and `$$(NAME)` is a literal `$(NAME)`."""

    def replacement(match: re.Match[str]) -> str:
        reference = match[1]
        return "$" if reference == "$" else variables.get(reference[1:-1], match[0])

    return _REFERENCE.sub(replacement, text)


def render_environment(
    facts: PodFacts, container: Manifest, sources: Sources, mounts: Mounts, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the container's variables over `base` (what it inherits). Raises `ConfigMissing` if a target is missing."""
    variables: dict[str, str] = {}
    for entry in container.get("envFrom") or ():
        variables |= _from_object(entry, sources)
    for entry in container.get("env") or ():
        value = _value(facts, container, entry, sources, variables)
        if value is not None:
            variables[entry["name"]] = value
    return dict(base) | {name: mounts.rewrite(value) for name, value in variables.items()}


def _from_object(entry: Manifest, sources: Sources) -> dict[str, str]:
    prefix = entry.get("prefix", "")
    for kind, lookup in (("configMapRef", sources.config_map), ("secretRef", sources.secret)):
        if kind in entry:
            data = _data(entry[kind], lookup, "configmap" if kind == "configMapRef" else "secret")
            return {prefix + key: value for key, value in data.items()}
    return {}


def _data(reference: Manifest, lookup: Lookup, word: str) -> Mapping[str, str]:
    data = lookup(reference["name"])
    if data is None and not reference.get("optional"):
        raise ConfigMissing(f'{word} "{reference["name"]}" not found')
    return data or {}


def _value(
    facts: PodFacts, container: Manifest, entry: Manifest, sources: Sources, variables: Mapping[str, str]
) -> str | None:
    source: dict[str, Any] = entry.get("valueFrom") or {}
    if "fieldRef" in source:
        return field_value(facts, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource_value(facts, container, source["resourceFieldRef"])
    for kind, lookup, word in (
        ("configMapKeyRef", sources.config_map, "configmap"),
        ("secretKeyRef", sources.secret, "secret"),
    ):
        if kind in source:
            return _key(source[kind], lookup, word)
    return expand(str(entry.get("value") or ""), variables)


def _key(reference: Manifest, lookup: Lookup, word: str) -> str | None:
    data = _data(reference, lookup, word)
    if reference["key"] not in data and not reference.get("optional"):
        raise ConfigMissing(f'key "{reference["key"]}" not found in {word} "{reference["name"]}"')
    return data.get(reference["key"])
