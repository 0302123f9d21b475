"""Where everything of one local stack lies on disk, and JSON files that are never there by half."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_local.errors import LocalError

__all__ = ["HOME_VARIABLE", "MARKER", "StateDir", "read_json", "state_dir", "write_json"]

HOME_VARIABLE = "PACELINE_HOME"
# every process of a stack carries this in its environment, so that `down` finds also what nobody recorded
MARKER = "PACELINE_LOCAL_STATE"


@dataclass(frozen=True, slots=True)
class StateDir:
    """The folders and files of one local stack."""

    home: Path

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of the control plane (0600)."""
        return self.home / "kubeconfig"

    @property
    def lock(self) -> Path:
        """Locked by the supervisor for as long as it lives."""
        return self.home / "lock"

    @property
    def status(self) -> Path:
        """What the supervisor says about its children, for `up` and `status`."""
        return self.home / "status.json"

    @property
    def network(self) -> Path:
        """Which part of 127.0.0.0/8 the stack uses, and the API server's port."""
        return self.home / "network.json"

    @property
    def api(self) -> Path:
        """The API server's own folder."""
        return self.home / "apiserver"

    @property
    def logs(self) -> Path:
        """Logs of the stack's own processes."""
        return self.home / "logs"

    @property
    def pods(self) -> Path:
        """One folder per pod: volumes, logs, records of its processes."""
        return self.home / "pods"

    @property
    def scratch(self) -> Path:
        """The emptyDir volumes: under the system's temporary folder, because Unix sockets in them need a short path (a
        socket's path has 107 bytes at most, however long the home is)."""
        digest = hashlib.sha256(os.fspath(self.home).encode()).hexdigest()
        return Path(tempfile.gettempdir()) / f"paceline-local-{digest[:8]}"

    @property
    def claims(self) -> Path:
        """One folder per PersistentVolumeClaim, kept when pods go."""
        return self.home / "claims"

    def log(self, name: str) -> Path:
        """Return the log file of one of the stack's own processes."""
        return self.logs / f"{name}.log"

    def foreign(self) -> str | None:
        """Return the name of something in a home that was never a stack's, None if it may be used (and cleaned) as ours."""
        if self.lock.exists() or self.api.exists() or not self.home.is_dir():
            return None
        return next((path.name for path in self.home.iterdir() if not path.name.startswith(".")), None)

    def create(self) -> None:
        """Make the folders, readable only by the user: they hold Secrets and keys. Raises `LocalError` or OSError."""
        other = self.foreign()
        if other is not None:  # `down` would delete what merely has the name of something of ours, such as `logs`
            raise LocalError(f"{self.home} isn't a stack's folder (it holds {other!r}): choose an empty or a new one")
        for folder in (self.home, self.api, self.logs, self.pods, self.claims, self.scratch):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self.scratch.lstat()  # anybody may make a folder in /tmp, and wait for us to write into it
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise LocalError(f"{self.scratch} belongs to somebody else: remove it or set TMPDIR")


def state_dir(home: str | None = None) -> StateDir:
    """Return the state folder: `home`, else `$PACELINE_HOME`, else `~/.paceline/local`."""
    chosen = home or os.environ.get(HOME_VARIABLE) or "~/.paceline/local"
    return StateDir(Path(chosen).expanduser().absolute())


def write_json(path: Path, document: Any, *, mode: int = 0o600) -> None:
    """Replace a file by the JSON of `document`; a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        json.dump(document, file)
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Return a file's JSON, or None if it isn't there or isn't JSON (as after a full disk)."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None
