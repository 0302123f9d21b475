"""How repositories are reached: endpoint, token, cache, and which hosts are allowed, out of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from paceline_runtime.model_errors import UriError

__all__ = ["ALLOWED_HOSTS_ENV", "HubSettings"]

ALLOWED_HOSTS_ENV = "PACELINE_ALLOWED_MODEL_HOSTS"
_TRUE = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True)
class HubSettings:
    """The Hugging Face variables have their usual meaning (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE, HF_HOME).

    `hosts` are patterns such as `huggingface.co` or `*.hf.co`; None allows all.
    """

    endpoint: str
    cache: Path
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    hosts: tuple[str, ...] | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HubSettings:
        """Read the settings. Raises `UriError` for an endpoint that isn't an http(s) address."""
        endpoint = environment.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
            raise UriError(f"HF_ENDPOINT={endpoint!r} must be an http:// or https:// address")
        home = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        hosts = environment.get(ALLOWED_HOSTS_ENV, "")
        return cls(
            endpoint=endpoint,
            cache=Path(environment.get("HF_HUB_CACHE") or home / "hub").expanduser(),
            token=environment.get("HF_TOKEN", "").strip() or None,
            offline=environment.get("HF_HUB_OFFLINE", "").lower() in _TRUE,
            hosts=tuple(host.strip() for host in hosts.split(",") if host.strip()) or None,
        )

    def check_host(self, url: str) -> None:
        """Raise `UriError` if the host of `url` isn't allowed."""
        host = urlsplit(url).hostname or ""
        if self.hosts is not None and not any(fnmatchcase(host, pattern.lower()) for pattern in self.hosts):
            raise UriError(f"models may not come from the host {host!r}, only from {', '.join(self.hosts)}")
