"""Where a model's files are: URIs become local paths. No torch here.

| URI | meaning |
|---|---|
| `/path`, `file:///path` | a GGUF file or a Hugging Face folder |
| `pkg://package/file` | a file inside an installed Python package, which is located but never imported |
| `hf://org/name[/file.gguf][@revision]` | a Hugging Face repository, or one GGUF file of it, downloaded (see `hub`) |
| `pvc://claim/path` | a file or folder on a volume claim, mounted by the operator under `/models/<claim>` |

`PACELINE_ALLOWED_MODEL_SCHEMES` (`pvc,hf`) leaves only these; without it all are allowed.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from paceline_runtime.hub_settings import HubSettings
from paceline_runtime.model_errors import ModelNotFound, UriError

__all__ = ["ALLOWED_SCHEMES_ENV", "MODELS_ROOT_ENV", "resolve_model", "split_uri"]

# where claims are mounted; the local node agent moves mounts into a pod's folder and rewrites this variable
MODELS_ROOT_ENV = "PACELINE_MODELS_ROOT"
ALLOWED_SCHEMES_ENV = "PACELINE_ALLOWED_MODEL_SCHEMES"
_DEFAULT_MODELS_ROOT = "/models"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PACKAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./-]+\.gguf))?(?:@([\w./-]+))?")
_MAX_URI = 2048


def split_uri(uri: str) -> tuple[str, str]:
    """Return the scheme (`file` for a bare path) and the rest. Raises `UriError` for one that is unknown or not allowed."""
    if not isinstance(uri, str) or not uri or len(uri) > _MAX_URI or "\0" in uri:
        raise UriError(f"a model URI is a text of 1 to {_MAX_URI} characters, got {str(uri)[:80]!r}")
    match = _SCHEME.fullmatch(uri)
    scheme, rest = match.groups() if match else ("file", uri)
    if scheme not in _RESOLVERS:
        raise UriError(f"model URI {uri!r} has the unknown scheme {scheme!r}: use one of {', '.join(_RESOLVERS)}")
    allowed = os.environ.get(ALLOWED_SCHEMES_ENV, "").lower().replace(",", " ").split()
    if allowed and scheme not in allowed:
        raise UriError(f"model URI {uri!r} isn't allowed here: {ALLOWED_SCHEMES_ENV} is {', '.join(allowed)}")
    return scheme, rest


def resolve_model(uri: str, revision: str | None = None) -> Path:
    """Return the local file or folder that `uri` names, downloading an `hf://` repository if needed.

    `revision` (a branch, tag or commit) is for `hf://` only. Raises `UriError` or `ModelNotFound`.
    """
    scheme, rest = split_uri(uri)
    if revision and scheme != "hf":
        raise UriError(f"revision {revision!r} makes sense with hf:// only, not with {uri!r}")
    path = _RESOLVERS[scheme](uri, rest, revision)
    if not path.exists():
        hint = f" (did you mean hf://{uri}?)" if _REPOSITORY.fullmatch(uri) else ""  # what other servers take as a name
        raise ModelNotFound(f"model {uri!r} not found: {path} doesn't exist{hint}")
    return path


def _resolve_file(uri: str, rest: str, _revision: str | None) -> Path:
    if uri.startswith("file://") and not rest.startswith("/"):
        raise UriError(f"model URI {uri!r} must hold an absolute path, as in file:///srv/models/name")
    return Path(rest)


def _resolve_package(uri: str, rest: str, _revision: str | None) -> Path:
    package, _, inner = rest.partition("/")
    if not _PACKAGE.fullmatch(package):
        raise UriError(f"model URI {uri!r} must name a top-level package, as in pkg://package/file")
    relative = _relative(uri, inner)
    # a top-level name is located without running any of the package's code
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(f"model {uri!r} not found: the package {package!r} isn't installed here")
    return _inside(uri, Path(next(iter(spec.submodule_search_locations))), relative)


def _resolve_claim(uri: str, rest: str, _revision: str | None) -> Path:
    claim, _, inner = rest.partition("/")
    if not _CLAIM.fullmatch(claim) or ".." in claim:
        raise UriError(f"model URI {uri!r} must name a volume claim, as in pvc://claim/folder")
    root = Path(os.environ.get(MODELS_ROOT_ENV, _DEFAULT_MODELS_ROOT)) / claim
    return _inside(uri, root, _relative(uri, inner)) if inner else root


def _resolve_hugging_face(uri: str, rest: str, revision: str | None) -> Path:
    match = _REPOSITORY.fullmatch(rest)
    if match is None or ".." in rest:
        raise UriError(f"model URI {uri!r} must read hf://organisation/name[/file.gguf][@revision]")
    repository, file, pinned = match.groups()
    if revision and pinned and revision != pinned:
        raise UriError(f"model URI {uri!r} and revision {revision!r} name two revisions: give one")
    from paceline_runtime.hub import fetch_model

    return fetch_model(repository, pinned or revision, file, HubSettings.from_environment(os.environ))


def _relative(uri: str, inner: str) -> PurePosixPath:
    relative = PurePosixPath(inner)
    if not inner or relative.is_absolute() or ".." in relative.parts:
        raise UriError(f"model URI {uri!r} must hold a path below its root, without '..'")
    return relative


def _inside(uri: str, root: Path, relative: PurePosixPath) -> Path:
    """Return the path below `root`; a symbolic link that leads outside is refused."""
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()):
        raise UriError(f"model URI {uri!r} leads outside {root}")
    return path


_RESOLVERS: dict[str, Callable[[str, str, str | None], Path]] = {
    "file": _resolve_file,
    "pkg": _resolve_package,
    "hf": _resolve_hugging_face,
    "pvc": _resolve_claim,
}
