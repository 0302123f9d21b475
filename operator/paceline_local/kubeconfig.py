"""Read a kubeconfig: which server, which certificate authority, who we are."""

from __future__ import annotations

import base64
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline_local.errors import LocalError

__all__ = ["Connection", "load_connection"]


@dataclass(frozen=True)
class Connection:
    """How to reach an API server: its URL, the headers that say who we are, and the TLS context."""

    server: str
    headers: dict[str, str]
    tls: ssl.SSLContext | None


def load_connection(kubeconfig: Path) -> Connection:
    """Return the connection of the kubeconfig's current context. Raises `LocalError` if the file can't be used."""
    try:
        document = yaml.safe_load(kubeconfig.read_text())
        context = _named(document["contexts"], document["current-context"])["context"]
        cluster = _named(document["clusters"], context["cluster"])["cluster"]
        user = _named(document["users"], context["user"]).get("user") or {}
        return Connection(cluster["server"], _headers(user), _tls(cluster, user, kubeconfig.parent))
    except FileNotFoundError as error:
        raise LocalError(f"no kubeconfig at {error.filename}") from error
    except (KeyError, TypeError, StopIteration, yaml.YAMLError, ssl.SSLError, ValueError) as error:
        raise LocalError(f"{kubeconfig} isn't a usable kubeconfig: {error!r}") from error


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


def _headers(user: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {user['token']}"} if user.get("token") else {}


def _pem(entry: dict[str, Any], key: str, folder: Path) -> str | None:
    """Return a PEM text given inline (base64) or as a file, relative to the kubeconfig's folder."""
    if f"{key}-data" in entry:
        return base64.b64decode(entry[f"{key}-data"]).decode()
    return (folder / entry[key]).read_text() if key in entry else None


def _tls(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext | None:
    if not cluster["server"].startswith("https:"):
        return None
    context = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority", folder))
    certificate, key = _pem(user, "client-certificate", folder), _pem(user, "client-key", folder)
    if certificate and key:
        # the ssl module loads a key only from a file; this one is private to us and gone at once
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(certificate + "\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context
