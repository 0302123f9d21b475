"""Which fields an object has: layouts of lists and maps, field paths, and `fieldsV1` as in `managedFields`.

A path is a tuple of elements in `fieldsV1` notation: `f:name` (member), `k:{…}` (item of a keyed list), `v:…` (member of a
set). Lists without keys and atomic maps are leaves. The rules are those of Kubernetes' structured-merge-diff.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline_local.apiserver.errors import bad_request
from paceline_local.apiserver.objects import Json

__all__ = [
    "BuiltinLayout",
    "Layout",
    "Path",
    "SchemaLayout",
    "decode",
    "encode",
    "flatten",
    "item_element",
    "mistyped",
    "path_text",
    "root",
]

Path = tuple[str, ...]

_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("containers", "initContainers", "ephemeralContainers", "env", "volumes", "secrets"), ("name",)),
    **dict.fromkeys(("imagePullSecrets", "schedulingGates", "resourceClaims"), ("name",)),
    **dict.fromkeys(("conditions", "addresses"), ("type",)),
    **dict.fromkeys(("podIPs", "hostIPs", "hostAliases"), ("ip",)),
    "ownerReferences": ("uid",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_PORT_KEYS = {
    "spec": ("port", "protocol"),
    **dict.fromkeys(("[containers]", "[initContainers]"), ("containerPort", "protocol")),
}
_SETS = frozenset({"finalizers", "podCIDRs"})
_ATOMIC_MAPS = frozenset(
    {"selector", "nodeSelector", "labelSelector", "podSelector", "namespaceSelector", "involvedObject", "regarding"}
    | {"secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef", "claimRef", "scaleTargetRef", "roleRef"}
)
_SERVER_FIELDS = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "selfLink", "managedFields"}
    | {"deletionTimestamp", "deletionGracePeriodSeconds"}
)


class Layout(Protocol):
    """How one value merges: as a leaf (`atomic`), a set, a list keyed by `keys`, or member by member."""

    @property
    def atomic(self) -> bool: ...  # noqa: D102

    @property
    def keys(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def is_set(self) -> bool: ...  # noqa: D102

    def child(self, name: str) -> Layout: ...  # noqa: D102

    def items(self) -> Layout: ...  # noqa: D102

    def key_default(self, key: str) -> Any: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class BuiltinLayout:
    """Layout of a built-in kind's value, known by its name and its parent's."""

    name: str = ""
    parent: str = ""

    @property
    def atomic(self) -> bool:
        """Tell whether a map here is replaced as a whole."""
        return self.name in _ATOMIC_MAPS

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the members that identify a list's items, or none."""
        return _PORT_KEYS.get(self.parent, ()) if self.name == "ports" else _KEYS.get(self.name, ())

    @property
    def is_set(self) -> bool:
        """Tell whether a list here is a set of scalars."""
        return self.name in _SETS

    def child(self, name: str) -> BuiltinLayout:
        """Return the layout of a member."""
        return BuiltinLayout(name, self.name)

    def items(self) -> BuiltinLayout:
        """Return the layout of a list's items."""
        return BuiltinLayout(f"[{self.name}]", self.parent)

    def key_default(self, key: str) -> Any:
        """Return the value of a key that an item leaves out."""
        return "TCP" if key == "protocol" else None


_ROOT = BuiltinLayout()


@dataclass(frozen=True, slots=True)
class SchemaLayout:
    """Layout of a custom resource's value, from its OpenAPI schema's `x-kubernetes-*` extensions."""

    schema: Mapping[str, Any] = field(default_factory=dict)

    @property
    def atomic(self) -> bool:
        """Tell whether a map here is replaced as a whole."""
        return self.schema.get("x-kubernetes-map-type") == "atomic"

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the members that identify a list's items, or none."""
        return tuple(self.schema.get("x-kubernetes-list-map-keys") or ()) if self._list_type == "map" else ()

    @property
    def is_set(self) -> bool:
        """Tell whether a list here is a set of scalars."""
        return self._list_type == "set"

    @property
    def _list_type(self) -> str:
        return str(self.schema.get("x-kubernetes-list-type", "atomic"))

    def child(self, name: str) -> SchemaLayout:
        """Return the layout of a member."""
        inner = (self.schema.get("properties") or {}).get(name) or self.schema.get("additionalProperties")
        return SchemaLayout(inner if isinstance(inner, Mapping) else {})

    def items(self) -> SchemaLayout:
        """Return the layout of a list's items."""
        return SchemaLayout(self.schema.get("items") or {})

    def key_default(self, key: str) -> Any:
        """Return the value of a key that an item leaves out."""
        return self.items().child(key).schema.get("default")


@dataclass(frozen=True, slots=True)
class _Root:
    """A custom resource: its metadata follows the built-in rules, the rest its schema."""

    body: SchemaLayout
    atomic: bool = False
    keys: tuple[str, ...] = ()
    is_set: bool = False

    def child(self, name: str) -> Layout:
        return BuiltinLayout("metadata") if name == "metadata" else self.body.child(name)

    def items(self) -> Layout:
        return self.body.items()

    def key_default(self, key: str) -> Any:
        return None


def root(*, custom: bool, schema: Mapping[str, Any]) -> Layout:
    """Return the layout of a whole object."""
    return _Root(SchemaLayout(schema)) if custom else BuiltinLayout()


def flatten(obj: Json, layout: Layout) -> dict[Path, Any]:
    """Return every owned field of a whole object with its value; identity and server-set metadata are left out."""
    found: dict[Path, Any] = {}
    body = {name: value for name, value in obj.items() if name not in ("apiVersion", "kind")}
    meta = {name: value for name, value in (body.pop("metadata", None) or {}).items() if name not in _SERVER_FIELDS}
    _walk(body, layout, (), found)
    if meta:
        _walk(meta, layout.child("metadata"), ("f:metadata",), found)
    return found


def _walk(value: Any, layout: Layout, path: Path, found: dict[Path, Any]) -> None:
    if isinstance(value, dict) and (value or not path) and not layout.atomic:
        for name, inner in value.items():
            _walk(inner, layout.child(name), (*path, f"f:{name}"), found)
    elif isinstance(value, list) and layout.keys:
        for item in value:
            here = (*path, item_element(item, layout))
            if here in found:
                raise bad_request(f"{path_text(path)}: duplicate entries for key {here[-1][2:]}")
            found[here] = None
            _walk_item(item, layout.items(), here, found)
    elif isinstance(value, list) and layout.is_set:
        found.update({(*path, f"v:{_compact(item)}"): None for item in value})
    else:
        found[path] = value


def _walk_item(item: Json, layout: Layout, path: Path, found: dict[Path, Any]) -> None:
    for name, inner in item.items():
        _walk(inner, layout.child(name), (*path, f"f:{name}"), found)


def mistyped(value: Any, layout: Layout = _ROOT, path: str = "") -> str:
    """Return where a keyed list is expected and something else stands, in the real server's words; "" if nowhere."""
    if layout.keys and not isinstance(value, list | None):
        return f"{path}: expected list, got {value!r}"
    members = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else ()
    found = (
        *(mistyped(inner, layout.child(name), f"{path}.{name}") for name, inner in members),
        *(mistyped(inner, layout.items(), f"{path}[{index}]") for index, inner in items),
    )
    return next(filter(None, found), "")


def item_element(item: Any, layout: Layout) -> str:
    """Return the path element of an item of a keyed list; a 400 `ApiError` if it lacks a key."""
    if not isinstance(item, dict):
        raise bad_request(f"associative list with keys {list(layout.keys)} has an element that isn't an object")
    values = {key: item.get(key, layout.key_default(key)) for key in layout.keys}
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise bad_request(f'associative list with keys has an element that omits key field "{missing[0]}"')
    return f"k:{_compact(values)}"


def encode(paths: Iterable[Path]) -> Json:
    """Return `fieldsV1` for a set of paths."""
    tree: Json = {}
    for path in sorted(paths):
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        node["."] = {}
    return _shortened(tree)


def _shortened(node: Json) -> Json:
    """A member without children is written `{}`, not `{".": {}}`."""
    if set(node) == {"."}:
        return {}
    return {element: inner if element == "." else _shortened(inner) for element, inner in node.items()}


def decode(tree: Mapping[str, Any], prefix: Path = ()) -> set[Path]:
    """Return the paths of a `fieldsV1`."""
    paths: set[Path] = set()
    for element, inner in tree.items():
        if element == ".":
            paths.add(prefix)
        elif inner:
            paths |= decode(inner, (*prefix, element))
        else:
            paths.add((*prefix, element))
    return paths


def path_text(path: Path) -> str:
    """Return a path as people read it: `.spec.containers[name="a"].image`."""
    return "".join(_element_text(element) for element in path)


def _element_text(element: str) -> str:
    kind, _, rest = element.partition(":")
    if kind == "k":
        return "[" + ",".join(f"{key}={_compact(value)}" for key, value in json.loads(rest).items()) + "]"
    return f".{rest}" if kind == "f" else f"[={rest}]"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
