"""Volumes of a pod as folders: ConfigMap, Secret, downward API and projected content, emptyDir, hostPath, claims.

Content is replaced as a kubelet does it: files are links into a dated folder behind the link `..data`, and that one link
is swapped, so that a reader sees all of the old or all of the new content.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_local.environment import Mounts, PodFacts, field_value, resource_value
from paceline_local.errors import ConfigMissing, LocalError
from paceline_local.manifests import Manifest
from paceline_local.resources import CONFIG_MAPS, SECRETS, Resource

__all__ = ["SUPPORTED_VOLUMES", "Content", "PodVolumes", "decode_object", "mounts_for", "referenced", "write_content"]

SUPPORTED_VOLUMES = frozenset(
    {"configMap", "secret", "downwardAPI", "projected", "emptyDir", "hostPath", "persistentVolumeClaim"}
)

Content = Mapping[str, bytes]  # path inside the volume → content
Objects = Mapping[tuple[str, str], Manifest | None]  # (plural, name) → object, None if it doesn't exist


def referenced(pod: Manifest) -> set[tuple[Resource, str]]:
    """Return the ConfigMaps and Secrets that a pod's volumes and variables name."""
    found: set[tuple[Resource, str]] = set()
    for volume in pod["spec"].get("volumes") or ():
        for source in [volume, *((volume.get("projected") or {}).get("sources") or ())]:
            if source.get("configMap"):
                found.add((CONFIG_MAPS, source["configMap"]["name"]))
            if source.get("secret"):
                found.add((SECRETS, source["secret"].get("secretName") or source["secret"]["name"]))
    for container in [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]:
        for entry in [*(container.get("envFrom") or ()), *((e.get("valueFrom") or {}) for e in container.get("env") or ())]:
            for key, resource in _ENV_SOURCES.items():
                if key in entry:
                    found.add((resource, entry[key]["name"]))
    return found


_ENV_SOURCES = {
    "configMapRef": CONFIG_MAPS,
    "configMapKeyRef": CONFIG_MAPS,
    "secretRef": SECRETS,
    "secretKeyRef": SECRETS,
}


def decode_object(obj: Manifest) -> dict[str, bytes]:
    """Return the content of a ConfigMap (`data`, `binaryData`) or a Secret (`data` in base64)."""
    encoded, plain = ("data", "stringData") if obj["kind"] == "Secret" else ("binaryData", "data")
    try:
        binary = {key: base64.b64decode(value) for key, value in (obj.get(encoded) or {}).items()}
    except (TypeError, ValueError) as error:
        raise ConfigMissing(f"{obj['kind']} {obj['metadata']['name']!r}: {encoded} isn't base64 ({error})") from error
    return binary | {key: str(value).encode() for key, value in (obj.get(plain) or {}).items()}


@dataclass(frozen=True)
class PodVolumes:
    """The volumes of one pod: content under `root`, emptyDirs under `scratch`, PersistentVolumeClaims under `claims`."""

    root: Path
    scratch: Path
    claims: Path
    facts: PodFacts

    def path(self, volume: Manifest) -> Path:
        """Return the folder (or the host's path) that stands for a volume."""
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            return self.claims / str(self.facts.pod["metadata"]["namespace"]) / str(claim)
        if set(volume) <= {"name", "emptyDir"}:
            return self.scratch / str(volume["name"])
        return self.root / str(volume["name"])

    def write(self, objects: Objects) -> None:
        """Make all volumes, or bring their content up to date. Raises `ConfigMissing` if a needed object isn't there."""
        for volume in self.facts.pod["spec"].get("volumes") or ():
            content = self._content(volume, objects)
            if content is not None:
                write_content(self.path(volume), content, _mode(volume))
            elif "hostPath" in volume:
                _check_host_path(volume)
            else:
                self.path(volume).mkdir(parents=True, exist_ok=True)

    def _content(self, volume: Manifest, objects: Objects) -> Content | None:
        """Return the content of a volume that has any of its own, None for a plain folder."""
        if "projected" in volume:
            merged: dict[str, bytes] = {}
            for source in volume["projected"].get("sources") or ():
                merged |= self._source(source, objects) or {}
            return merged
        return self._source(volume, objects)

    def _source(self, source: Manifest, objects: Objects) -> Content | None:
        if "configMap" in source:
            return _items(source["configMap"], source["configMap"]["name"], CONFIG_MAPS, objects)
        if "secret" in source:
            name = source["secret"].get("secretName") or source["secret"]["name"]
            return _items(source["secret"], name, SECRETS, objects)
        if "downwardAPI" in source:
            return {item["path"]: self._downward(item) for item in source["downwardAPI"].get("items") or ()}
        if "serviceAccountToken" in source:
            raise LocalError("serviceAccountToken volumes aren't available locally: pods have no identity of their own here")
        return None

    def _downward(self, item: Manifest) -> bytes:
        if "fieldRef" in item:
            return field_value(self.facts, item["fieldRef"]["fieldPath"]).encode()
        reference = item["resourceFieldRef"]
        containers = self.facts.pod["spec"]["containers"]
        container = next(c for c in containers if c["name"] == reference["containerName"])
        return resource_value(self.facts, container, reference).encode()


def _items(source: Manifest, name: str, resource: Resource, objects: Objects) -> Content:
    obj = objects.get((resource.plural, name))
    if obj is None:
        if source.get("optional"):
            return {}
        raise ConfigMissing(f'{resource.kind.lower()} "{name}" not found')
    data = decode_object(obj)
    if not source.get("items"):
        return data
    missing = [item["key"] for item in source["items"] if item["key"] not in data]
    if missing and not source.get("optional"):
        raise ConfigMissing(f'{resource.kind.lower()} "{name}" references non-existent key: {missing[0]}')
    return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}


def _mode(volume: Manifest) -> int:
    for kind in ("configMap", "secret", "downwardAPI", "projected"):
        if kind in volume:
            return int(volume[kind].get("defaultMode") or 0o644)
    return 0o644


def _check_host_path(volume: Manifest) -> None:
    path, kind = Path(volume["hostPath"]["path"]), volume["hostPath"].get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        raise ConfigMissing(f'hostPath "{path}" of volume "{volume["name"]}" does not exist on this machine')


def write_content(folder: Path, content: Content, mode: int) -> None:
    """Make `folder` show exactly `content`, swapped in at once. Unchanged content is left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "..data"
    old = folder / link.readlink() if link.is_symlink() else None
    if old is not None and _same(old, content):
        return
    fresh = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    fresh.chmod(0o755)
    for path, data in content.items():
        target = _inside(fresh, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)
    swap = folder / "..data_tmp"
    swap.unlink(missing_ok=True)
    swap.symlink_to(fresh.name)
    swap.replace(link)
    _link_entries(folder, {path.split("/")[0] for path in content})
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _inside(folder: Path, path: str) -> Path:
    if path.startswith("/") or ".." in Path(path).parts:
        raise LocalError(f"path {path!r} of a volume's item leaves the volume")
    return folder / path


def _same(folder: Path, content: Content) -> bool:
    present = {str(f.relative_to(folder)): f for f in folder.rglob("*") if f.is_file()}
    return present.keys() == content.keys() and all(present[path].read_bytes() == data for path, data in content.items())


def _link_entries(folder: Path, names: set[str]) -> None:
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in names:
            entry.unlink()


def mounts_for(container: Manifest, pod: Manifest, volumes: PodVolumes) -> Mounts:
    """Return the container's mounts: where each mount path really is."""
    by_name = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    paths: dict[str, str] = {}
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in by_name:
            raise LocalError(f"volumeMount {mount['name']!r} of container {container['name']!r} names no volume of the pod")
        root = volumes.path(by_name[mount["name"]])
        sub = mount.get("subPath") or ""
        target = _inside(root, sub) if sub else root
        if sub and not target.exists() and "emptyDir" in by_name[mount["name"]]:
            target.mkdir(parents=True, exist_ok=True)
        paths[mount["mountPath"]] = os.fspath(target)
    return Mounts(paths)
