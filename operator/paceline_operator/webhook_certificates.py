"""Keeps the webhook's certificate current: in one Secret for all replicas, or in files that cert-manager renews.

Each round looks at what is there and takes the next step if one is due; replicas that take it at the same moment are told
apart by the Secret's version, and the one that comes second uses what the first has written.
"""

from __future__ import annotations

import logging
import os
import ssl
import tempfile
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from kubernetes import client

from paceline_operator.certificates import Bundle, expiry, issue, next_bundle, read_bundle
from paceline_operator.errors import ApiRefused, ApiUnavailable, SettingsError
from paceline_operator.metrics import Metrics
from paceline_operator.names import FIELD_MANAGER
from paceline_operator.settings import Settings
from paceline_operator.transport import MERGE, Answer, Object, send

__all__ = ["CertificateKeeper", "FileSource", "SecretSource"]

logger = logging.getLogger(__name__)
_ROUND = 10.0  # seconds between two looks: mounted files and Secrets change without telling
_RETRY = 1.0  # seconds between attempts to get the first one
_CONFIGS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


class Source(Protocol):
    """Where a certificate comes from."""

    def load(self, now: datetime) -> tuple[bytes, bytes]:
        """Return certificate chain and key (PEM). Raises `ApiUnavailable`, `ApiRefused`, `OSError`."""


class FileSource:
    """`tls.crt` and `tls.key` of a folder, as cert-manager mounts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, now: datetime) -> tuple[bytes, bytes]:
        """Return what the files hold now."""
        return (self._folder / "tls.crt").read_bytes(), (self._folder / "tls.key").read_bytes()


class SecretSource:
    """The certificates in a Secret of the operator's namespace, made and renewed by whichever replica sees the need first;
    the API server is told whom to trust in the webhook's configuration."""

    def __init__(self, configuration: client.Configuration, settings: Settings, metrics: Metrics) -> None:
        self._api = client.ApiClient(configuration)
        self._metrics = metrics
        self._names = settings.webhook_names
        self._secrets = f"/api/v1/namespaces/{settings.operator_namespace}/secrets"
        self._secret, self._config = settings.webhook_secret, settings.webhook_config

    def load(self, now: datetime) -> tuple[bytes, bytes]:
        """Take the step that is due, if any, and return what the Secret holds then."""
        bundle = self._stored(now)
        if self._config:
            trusted = self._trust(bundle.authorities)
            step = next_bundle(bundle, self._names, trusted, now)
        else:  # whoever made the configuration looks after it, with what the Secret's ca.crt says
            step = next_bundle(bundle, self._names, bundle.authorities, now)
        if step != bundle:
            logger.info("renews the webhook's certificates in the Secret %s", self._secret)
            bundle = self._replace(step)
        return bundle.serving, bundle.serving_key

    def _stored(self, now: datetime) -> Bundle:
        """Return the Secret's bundle; make one if there is none that can be used."""
        found = self._call("GET", f"{self._secrets}/{self._secret}", "Secret").result("the webhook's Secret")
        self._version = str(found["metadata"]["resourceVersion"]) if found else ""
        data = {name: b64decode(value) for name, value in ((found or {}).get("data") or {}).items()}
        return read_bundle(data) or self._replace(issue(self._names, now))

    def _replace(self, bundle: Bundle) -> Bundle:
        """Write the bundle over the version that was read. Raises `ApiUnavailable` if another replica was first."""
        meta: Object = {"name": self._secret, "labels": {"app.kubernetes.io/part-of": "paceline"}}
        data = {name: b64encode(value).decode() for name, value in bundle.data().items()}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": data}
        if self._version:
            patch = {"metadata": {"resourceVersion": self._version}, "data": data}
            answer = self._call("PATCH", f"{self._secrets}/{self._secret}", "Secret", patch, MERGE)
        else:
            answer = self._call("POST", self._secrets, "Secret", body)
        if answer.status == 409:
            raise ApiUnavailable("another replica has renewed the certificates at the same moment: looks again")
        written = answer.result("the webhook's Secret")
        if written is None:
            raise ApiUnavailable(f"{self._secrets}: there is no such place now")
        self._version = str(written["metadata"]["resourceVersion"])
        return bundle

    def _trust(self, authorities: bytes) -> bytes:
        """Make the API server trust `authorities`; return what it has trusted for some time, not what it hears just now."""
        path = f"{_CONFIGS}/{self._config}"
        found = self._call("GET", path, "ValidatingWebhookConfiguration").result(path)
        if found is None:
            logger.warning("there is no ValidatingWebhookConfiguration %s: nothing asks this webhook", self._config)
            return authorities
        wanted, before = b64encode(authorities).decode(), authorities
        hooks = [hook for hook in found.get("webhooks") or [] if hook["clientConfig"].get("caBundle") != wanted]
        if hooks:
            whole = [{**hook, "clientConfig": {**hook["clientConfig"], "caBundle": wanted}} for hook in found["webhooks"]]
            patch = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "webhooks": whole}
            answer = self._call("PATCH", path, "ValidatingWebhookConfiguration", patch, MERGE)
            if answer.status == 409:
                raise ApiUnavailable(f"{self._config} has changed meanwhile: looks again")
            answer.result(path)
            before = b64decode(hooks[0]["clientConfig"].get("caBundle") or "")
        return before

    def _call(self, verb: str, path: str, kind: str, body: Any = None, content_type: str = "application/json") -> Answer:
        query = [("fieldManager", FIELD_MANAGER)] if verb != "GET" else []
        answer = send(self._api, verb, path, body, content_type, query)
        self._metrics.api_calls.labels(verb, kind, str(answer.status)).inc()
        if answer.status == 0 or answer.status >= 500 or answer.status == 429:
            raise ApiUnavailable(f"{verb} {path}: {answer.message[:200]}")
        return answer


class CertificateKeeper:
    """Gives an SSL context its certificate and keeps that current on a thread."""

    def __init__(self, source: Source, metrics: Metrics, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._source, self._metrics, self._clock = source, metrics, clock
        self._loaded: tuple[bytes, bytes] | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="certificates", daemon=True)

    def start(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Load a certificate, then keep it current; give up if `stopped`. Raises `SettingsError` if that can't work."""
        while not self.look():
            if self._ending.wait(_RETRY) or stopped():
                return
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> bool:
        """Load what is there now if it is new; return whether there is a certificate. Raises `SettingsError` if refused."""
        try:
            found = self._source.load(self._clock())
            if found != self._loaded:
                _load(self.context, *found)
                self._metrics.certificate_expiry.set(expiry(found[0]).timestamp())
                logger.info("the webhook shows a certificate that ends at %s", expiry(found[0]).isoformat())
                self._loaded = found
        except ApiRefused as error:
            remedy = "grant the rights of the chart's Role for the webhook"
            raise SettingsError(f"the webhook's certificates are refused to us: {error}: {remedy}") from error
        except (ApiUnavailable, OSError, ValueError) as error:  # ssl's errors are OSErrors; half-written files come again
            logger.warning("the webhook's certificate can't be loaded: %s; tried again", error)
        return self._loaded is not None

    def _keep(self) -> None:
        while not self._ending.wait(_ROUND):
            try:
                self.look()
            except SettingsError as error:  # rights that were taken away while we run: the certificate lasts for weeks
                logger.error("%s", error)


def _load(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Load PEM texts; OpenSSL's way in is a file, readable by us only and gone at once."""
    with tempfile.NamedTemporaryFile(prefix="paceline-webhook-") as file:
        file.write(chain + b"\n" + key)
        file.flush()
        os.fsync(file.fileno())
        context.load_cert_chain(file.name)
