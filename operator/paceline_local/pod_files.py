"""What a pod has on disk (folders, volumes, logs), and how its containers are started from that."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from paceline_local.client import ApiClient
from paceline_local.container import Launch
from paceline_local.environment import Mounts, PodFacts, Sources, expand, render_environment
from paceline_local.errors import ApiError, ConfigMissing
from paceline_local.manifests import Manifest
from paceline_local.probes import Target
from paceline_local.state import MARKER, StateDir
from paceline_local.volumes import Objects, PodVolumes, decode_object, mounts_for, referenced

__all__ = ["PodFiles", "pod_folder_name", "scratch_name"]

# what a process needs of its user's surroundings; anything else (credentials!) stays out, as it would in a cluster
_INHERITED = ("HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "HF_HOME")


def pod_folder_name(pod: Manifest) -> str:
    """Return the name of a pod's folder: namespace, name and uid."""
    meta = pod["metadata"]
    return f"{meta['namespace']}_{meta['name']}_{meta['uid']}"


def scratch_name(uid: str) -> str:
    """Return the name of a pod's folder of emptyDirs: short, for the sake of Unix sockets."""
    return uid[:8]


class PodFiles:
    """The folders of one pod. `facts` gives the pod's newest object whenever it is needed."""

    def __init__(self, pod: Manifest, state: StateDir, client: ApiClient, facts: Callable[[], PodFacts]) -> None:
        self.folder = state.pods / pod_folder_name(pod)
        self._scratch = state.scratch / scratch_name(pod["metadata"]["uid"])
        self._state, self._client, self._facts = state, client, facts
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove(self) -> None:
        """Delete the folders."""
        for folder in (self.folder, self._scratch):
            shutil.rmtree(folder, ignore_errors=True)

    async def write_volumes(self) -> None:
        """Make the volumes, or bring their content up to date. Raises `LocalError` or OSError."""
        self._volumes().write(await self._objects())

    async def launch(self, container: Manifest) -> Launch:
        """Return how to start the container; volumes are brought up to date first."""
        objects, facts, volumes = await self._objects(), self._facts(), self._volumes()
        volumes.write(objects)
        mounts = mounts_for(container, facts.pod, volumes)
        env = render_environment(facts, container, _sources(objects), mounts, self._base(facts))
        cwd = Path(mounts.rewrite(container["workingDir"])) if container.get("workingDir") else self.folder
        ports = {p["name"]: int(p["containerPort"]) for p in container.get("ports") or () if p.get("name")}
        return Launch(_command(container, env, mounts), env, cwd, Target(facts.pod_ip, ports, env, cwd))

    def _base(self, facts: PodFacts) -> dict[str, str]:
        """Return what every process inherits: PATH with this Python's folder first, and a few harmless variables."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        ours = {"PATH": path, "PACELINE_HOST": facts.pod_ip, "PYTHONUNBUFFERED": "1", MARKER: os.fspath(self._state.home)}
        return inherited | ours

    def _volumes(self) -> PodVolumes:
        return PodVolumes(self.folder / "volumes", self._scratch, self._state.claims, self._facts())

    async def _objects(self) -> dict[tuple[str, str], Manifest | None]:
        """Fetch the ConfigMaps and Secrets that the pod names, fresh from the API server."""
        pod = self._facts().pod
        found: dict[tuple[str, str], Manifest | None] = {}
        for resource, name in sorted(referenced(pod), key=str):
            try:
                obj = await self._client.get(resource, name, pod["metadata"]["namespace"])
                found[resource.plural, name] = {"kind": resource.kind} | obj
            except ApiError as error:
                if not error.not_found:
                    raise
                found[resource.plural, name] = None
        return found


def _command(container: Manifest, env: dict[str, str], mounts: Mounts) -> list[str]:
    """Return command and arguments; none without a command, since the image that would have one isn't there."""
    words = [*container["command"], *(container.get("args") or ())] if container.get("command") else []
    return [mounts.rewrite(expand(str(word), env)) for word in words]


def _sources(objects: Objects) -> Sources:
    return Sources(lambda name: _text(objects["configmaps", name]), lambda name: _text(objects["secrets", name]))


def _text(obj: Manifest | None) -> dict[str, str] | None:
    if obj is None:
        return None
    try:
        return {key: value.decode() for key, value in decode_object(obj).items()}
    except UnicodeDecodeError as error:
        raise ConfigMissing(f"{obj['kind']} {obj['metadata']['name']!r} isn't text, so it can't become variables") from error
