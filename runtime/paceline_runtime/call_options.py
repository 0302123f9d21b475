"""What a client says in the headers of a request, beside its body."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from paceline_core.durations import parse_duration
from paceline_core.errors import FormatError
from paceline_runtime.api_errors import invalid
from paceline_runtime.api_keys import ApiKey, api_key_of
from paceline_runtime.api_middleware import request_id
from paceline_runtime.tiers import MAX_PRIORITY, TIERS

__all__ = ["CallOptions", "read_options"]

_TRACEPARENT = 64  # characters; W3C's has 55


@dataclass(frozen=True, slots=True)
class CallOptions:
    """`timeout` is seconds until the first token stops being useful; a lower `priority` goes first.

    `in_header` says that a header asked for this priority, `best` is the lowest that the API key allows (None: any).
    `tenant` is the name of the API key, `salt` keeps its cached blocks apart from others'. `traceparent` is the client's
    trace.
    """

    request_id: str
    priority: int = 0
    timeout: float | None = None
    arrival: float = field(default_factory=time.monotonic)
    tenant: str = ""
    salt: int = 0
    traceparent: str = ""
    in_header: bool = False
    best: int | None = None

    def preferring(self, priority: int | None) -> CallOptions:
        """Return these options with what the body asks for (None: nothing): a header, set by a gateway, outranks it."""
        if priority is None or self.in_header:
            return self
        # nobody gets ahead of what their key allows
        return replace(self, priority=priority if self.best is None else max(priority, self.best))


def read_options(request: Request) -> CallOptions:
    """Read the headers and the API key. Raises `ApiError`."""
    key = api_key_of(request.scope)
    asked = _priority(request.headers.get("x-request-priority"))
    timeout = _timeout(request.headers.get("x-request-timeout"))
    identity, trace = request_id(request.scope), request.headers.get("traceparent", "")[:_TRACEPARENT]
    owner = key or ApiKey("")
    options = CallOptions(
        identity, owner.priority, timeout, tenant=owner.name, salt=0 if key is None else key.salt, traceparent=trace,
        best=None if key is None else key.priority,
    )  # fmt: skip
    return replace(options.preferring(asked), in_header=asked is not None)


def _priority(text: str | None) -> int | None:
    """Return `X-Request-Priority`: a whole number, or `interactive` or `batch`."""
    if text is None or text in TIERS:
        return None if text is None else TIERS[text]
    try:
        number = int(text)
    except ValueError:
        number = MAX_PRIORITY + 1
    if abs(number) > MAX_PRIORITY:
        allowed = "a whole number (lower goes first), 'interactive' or 'batch'"
        raise invalid(f"X-Request-Priority must be {allowed}, not {text[:40]!r}")
    return number


def _timeout(text: str | None) -> float | None:
    """Return seconds: `X-Request-Timeout` is a plain number of them, or a duration such as `500ms`."""
    if text is None:
        return None
    try:
        seconds = float(text) if text.replace(".", "", 1).isdigit() else parse_duration(text)
    except (FormatError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise invalid(f"X-Request-Timeout must be seconds or a duration above 0, as in 2.5 or 500ms, not {text[:40]!r}")
    return seconds
