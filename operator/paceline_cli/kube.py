"""A client of the API server that a kubeconfig names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline_core.errors import PacelineError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

__all__ = ["kube_client"]


def kube_client(kubeconfig: Path | None) -> ApiClient:
    """Return a client for a kubeconfig (None: as kubectl finds it). Raises `PacelineError` if that can't be used."""
    from kubernetes import config

    try:
        client: ApiClient = config.new_client_from_config(None if kubeconfig is None else str(kubeconfig))  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001  # the library checks nothing: what a wrong file leads to may be of any type
        words = " ".join(str(error).split()) or type(error).__name__
        raise PacelineError(f"no usable kubeconfig{f' {kubeconfig}' if kubeconfig else ''}: {words}") from None
    return client
