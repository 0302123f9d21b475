"""One exchange with the API server, blocking: what `cluster` runs on its threads, and what the Lease and the webhook use.

The official client takes care of addresses and credentials only; retries and errors are ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException

from paceline_operator.errors import ApiRefused

__all__ = ["APPLY", "MERGE", "UNMADE", "Answer", "Object", "send"]

Object = dict[str, Any]
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
_TIMEOUT = (5.0, 30.0)  # seconds to connect, to answer
# servers up to 1.20 (seen there) answer 500 to an apply of a wrong type or an unknown field, and to one that would create
# a Service and names a version: trying again can't help
UNMADE = "resourceVersion should not be set on objects to be created"
_MISTYPED = ("failed to create typed patch object", "failed to convert new object", UNMADE)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the API server; status 0 means that there was none."""

    status: int
    message: str
    data: Object | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, status: int, text: bytes, retry_after: float | None) -> Answer:
        """Return the answer that a body is."""
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if not isinstance(data, dict):  # whoever said that stands between us and the API server
            return cls(status if status >= 300 else 502, text[:200].decode(errors="replace"), None, retry_after)
        message = str(data.get("message", ""))
        if status == 500 and message.startswith(_MISTYPED):
            status = 400
        return cls(status, message, data, retry_after)

    def result(self, what: str) -> Object | None:
        """Return the data, None if there is no such object. Raises `ApiRefused` for every other refusal."""
        if self.status == 404:
            return None
        if not 0 < self.status < 300:
            raise ApiRefused(self.status, self.message or f"{what}: HTTP {self.status}")
        return self.data


def send(
    api: client.ApiClient,
    verb: str,
    path: str,
    body: Any = None,
    content_type: str = "application/json",
    query: list[tuple[str, str]] | None = None,
    *,
    timeout: tuple[float, float] = _TIMEOUT,
) -> Answer:
    """Send one request and return what came of it; never raises for what the server or the network does."""
    headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if body is not None else {})
    try:
        # reads the token anew now and then, from a file that a kubelet replaces
        request = api.param_serialize(verb, path, {}, query or [], headers, body, auth_settings=["BearerToken"])
        response = api.call_api(*request, _request_timeout=timeout)
        text = response.read()  # type: ignore[no-untyped-call]
    except (ApiException, ConfigException, urllib3.exceptions.HTTPError, OSError) as error:
        return Answer(int(getattr(error, "status", 0) or 0), str(error))
    retry_after = response.headers.get("Retry-After", "")
    return Answer.of(response.status, text, float(retry_after) if retry_after.isdigit() else None)
