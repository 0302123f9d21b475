"""The operator's settings: environment variables, checked at start, failing with one line that names the variable."""
# ruff: noqa: RUF009  `_variable` returns a dataclass field; ruff knows only `field` itself

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline_operator.errors import SettingsError

__all__ = ["Settings", "TemplatePolicy", "load_settings", "settings_help"]

_SHORTEST_KEY = 32  # bytes: as long as the HMAC-SHA256 output, so that the key isn't the weakest part


class TemplatePolicy(StrEnum):
    """How much of a pod template a spec may overlay."""

    NONE = "none"  # spec.template is refused
    RESTRICTED = "restricted"  # nothing that reaches beyond the pod: host paths, namespaces, ports, service accounts
    ANY = "any"  # everything that the operator's own rights allow: for clusters with one tenant, and for tests


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[,\s]+", text) if part)


def _template_policy(text: str) -> TemplatePolicy:
    return TemplatePolicy({"true": "any", "false": "none"}.get(text.lower(), text.lower()))


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65_535:
        raise ValueError(text)
    return port


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= 86_400:
        raise ValueError(text)
    return number


def _lease_seconds(text: str) -> float:
    number = float(text)
    if not 3 <= number <= 300:
        raise ValueError(text)
    return number


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1024:
        raise ValueError(text)
    return number


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(text)
    return text.upper()


def _variable(name: str, parse: Callable[[str], Any], default: Any, description: str, allowed: str = "") -> Any:
    metadata = {"variable": name, "parse": parse, "description": description, "allowed": allowed}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator is told by its environment. Everything that a spec could abuse is off unless it is allowed here."""

    runtime_image: str = _variable("PACELINE_RUNTIME_IMAGE", str, "", "image of the pods' runtime container (required)")
    image_pull_secrets: tuple[str, ...] = _variable(
        "PACELINE_IMAGE_PULL_SECRETS", _words, (), "names of Secrets, in each service's namespace, by which pods pull images"
    )
    operator_key: bytes = field(default=b"", repr=False)
    watch_namespaces: tuple[str, ...] = _variable(
        "PACELINE_WATCH_NAMESPACES", _words, (), "namespaces to serve, separated by commas; empty: all"
    )
    operator_namespace: str = _variable(
        "PACELINE_OPERATOR_NAMESPACE", str, "", "namespace of the operator's own pods; empty: no NetworkPolicies are made"
    )
    allowed_model_schemes: tuple[str, ...] = _variable(
        "PACELINE_ALLOWED_MODEL_SCHEMES", _words, ("hf", "pkg", "pvc"), "schemes that spec.model.uri may have"
    )
    allowed_images: tuple[str, ...] = _variable(
        "PACELINE_ALLOWED_IMAGES", _words, (), "patterns (with *) of images that a spec may name besides the runtime image"
    )
    template_policy: TemplatePolicy = _variable(
        "PACELINE_ALLOW_TEMPLATE",
        _template_policy,
        TemplatePolicy.NONE,
        "what spec.template may overlay",
        "none (default, also false), restricted or any (also true)",
    )
    allowed_service_accounts: tuple[str, ...] = _variable(
        "PACELINE_ALLOWED_SERVICE_ACCOUNTS", _words, (), "service accounts that a restricted spec.template may name"
    )
    admin_timeout: float = _variable(
        "PACELINE_ADMIN_TIMEOUT", _positive, 5.0, "seconds for one call to a pod's admin port", "0 < seconds ≤ 86400"
    )
    admin_concurrency: int = _variable(
        "PACELINE_ADMIN_CONCURRENCY", _count, 32, "calls to admin ports at once", "a whole number from 1 to 1024"
    )
    workers: int = _variable("PACELINE_WORKERS", _count, 8, "services reconciled at once", "a whole number from 1 to 1024")
    resync_interval: float = _variable(
        "PACELINE_RESYNC_INTERVAL", _positive, 60.0, "seconds between passes over all services", "0 < seconds ≤ 86400"
    )
    metrics_port: int = _variable(
        "PACELINE_METRICS_PORT", _port, 0, "port of /metrics, /healthz and /readyz; 0: none", "a port, or 0"
    )
    metrics_host: str = _variable("PACELINE_METRICS_HOST", str, "0.0.0.0", "address of /metrics, /healthz and /readyz")  # noqa: S104  a pod's own
    use_classes: bool = _variable(
        "PACELINE_CLASSES",
        _boolean,
        True,
        "whether InferenceClasses are read, a right on the whole cluster",
        "true or false",
    )
    class_rollouts: int = _variable(
        "PACELINE_CLASS_ROLLOUTS",
        _count,
        10,
        "services of one class that a change of the class may roll at once",
        "a whole number from 1 to 1024",
    )
    leader_election: bool = _variable(
        "PACELINE_LEADER_ELECTION",
        _boolean,
        False,
        "whether replicas elect a leader, by a Lease in PACELINE_OPERATOR_NAMESPACE; without it there may be one only",
        "true or false",
    )
    lease_duration: float = _variable(
        "PACELINE_LEASE_DURATION",
        _lease_seconds,
        9.0,
        "seconds without a renewal after which another replica leads",
        "3 ≤ seconds ≤ 300",
    )
    lease_name: str = _variable("PACELINE_LEASE_NAME", str, "paceline-operator", "name of that Lease")
    tuning_interval: float = _variable(
        "PACELINE_TUNING_INTERVAL", _positive, 30.0, "seconds between looks at a tuned service", "0 < seconds ≤ 86400"
    )
    tuning_workers: int = _variable(
        "PACELINE_TUNING_WORKERS", _count, 1, "processes in which the twin searches", "a whole number from 1 to 1024"
    )
    tuning_log: str = _variable("PACELINE_TUNING_LOG", str, "", "file for the log of tuning decisions (JSONL); empty: none")
    webhook_port: int = _variable(
        "PACELINE_WEBHOOK_PORT", _port, 0, "port of the admission webhook; 0: none", "a port, or 0"
    )
    webhook_host: str = _variable("PACELINE_WEBHOOK_HOST", str, "0.0.0.0", "address of the webhook")  # noqa: S104  a pod's own
    webhook_names: tuple[str, ...] = _variable(
        "PACELINE_WEBHOOK_NAMES", _words, (), "names by which the API server reaches it, as in paceline-webhook.ml.svc"
    )
    webhook_secret: str = _variable(
        "PACELINE_WEBHOOK_SECRET", str, "paceline-webhook", "Secret in which the replicas keep its certificates"
    )
    webhook_config: str = _variable(
        "PACELINE_WEBHOOK_CONFIG", str, "", "ValidatingWebhookConfiguration that is told whom to trust; empty: none"
    )
    webhook_cert_dir: str = _variable(
        "PACELINE_WEBHOOK_CERT_DIR", str, "", "folder with tls.crt and tls.key, as from cert-manager, instead of the Secret"
    )
    log_level: str = _variable("PACELINE_LOG_LEVEL", _level, "INFO", "how much is logged", "DEBUG, INFO, WARNING or ERROR")


_KEY_HELP = f"at least {_SHORTEST_KEY} bytes that admin tokens are derived from (this or the file is required)"


def load_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings that `environment` states. Raises `SettingsError` about the first variable that can't be used."""
    values = {}
    for name, definition in Settings.__dataclass_fields__.items():
        text = environment.get(definition.metadata.get("variable", ""), "").strip()
        if text:
            values[name] = _parsed(definition.metadata, text)
    settings = Settings(**values, operator_key=_operator_key(environment))
    if not settings.runtime_image:
        raise SettingsError(
            "PACELINE_RUNTIME_IMAGE is not set: name the image of the runtime, as in registry/paceline-runtime:1.0"
        )
    if settings.leader_election and not settings.operator_namespace:
        raise SettingsError("PACELINE_LEADER_ELECTION=true needs PACELINE_OPERATOR_NAMESPACE: the namespace of the Lease")
    _check_webhook(settings)
    return settings


def _check_webhook(settings: Settings) -> None:
    if settings.webhook_port and not settings.webhook_cert_dir:
        if not settings.webhook_names:
            raise SettingsError("PACELINE_WEBHOOK_PORT needs PACELINE_WEBHOOK_NAMES: what the certificate is made out to")
        if not settings.operator_namespace:
            raise SettingsError("PACELINE_WEBHOOK_PORT needs PACELINE_OPERATOR_NAMESPACE: the namespace of the Secret")


def settings_help() -> str:
    """Return one line per variable, for `--help`."""
    rows = [("PACELINE_OPERATOR_KEY", _KEY_HELP), ("PACELINE_OPERATOR_KEY_FILE", "file that holds the key")]
    for definition in Settings.__dataclass_fields__.values():
        if variable := definition.metadata.get("variable"):
            allowed = definition.metadata["allowed"]
            rows.append((variable, definition.metadata["description"] + (f": {allowed}" if allowed else "")))
    return "\n".join(f"  {name:<34} {text}" for name, text in rows)


def _parsed(metadata: Mapping[str, Any], text: str) -> Any:
    try:
        return metadata["parse"](text)
    except (ValueError, KeyError):
        raise SettingsError(f"{metadata['variable']}={text!r} can't be used: give {metadata['allowed']}") from None


def _operator_key(environment: Mapping[str, str]) -> bytes:
    key = environment.get("PACELINE_OPERATOR_KEY", "").encode()
    if path := environment.get("PACELINE_OPERATOR_KEY_FILE", ""):
        try:
            key = Path(path).read_bytes().strip()
        except OSError as error:
            raise SettingsError(f"PACELINE_OPERATOR_KEY_FILE={path!r} can't be read: {error.strerror}") from None
    if len(key) < _SHORTEST_KEY:
        have = "is not set" if not key else f"has {len(key)} bytes"
        raise SettingsError(
            f"the operator key {have}: set PACELINE_OPERATOR_KEY to {_KEY_HELP.split(' that', maxsplit=1)[0]}"
        )
    return key
