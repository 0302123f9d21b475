"""Errors of the local development tool.

```
LocalError(PacelineError)    one line for a person; the command ends with exit code 2
├── ApiError                 the API server answered with a Status that isn't success
├── ApiUnavailable           no answer: it isn't up, is starting again, or the connection broke
└── ConfigMissing            a ConfigMap, a Secret or a key that a pod needs isn't there (yet)
```
"""

from __future__ import annotations

from typing import Any

from paceline_core.errors import PacelineError

__all__ = ["ApiError", "ApiUnavailable", "ConfigMissing", "LocalError"]


class LocalError(PacelineError):
    """Base of what goes wrong in the local tool on account of its input or surroundings."""


class ApiUnavailable(LocalError):
    """The API server gave no answer. Loops try again; commands say so."""


class ConfigMissing(LocalError):
    """A pod refers to a ConfigMap, Secret, key or field that doesn't exist. It may come later, so the pod waits."""


class ApiError(LocalError):
    """The API server's refusal: HTTP `status`, `reason` (a stable word), `message` and `details` of its `Status` object."""

    def __init__(self, status: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.details = details or {}

    @property
    def not_found(self) -> bool:
        """Whether the object (or its whole kind) isn't there."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """Whether somebody else wrote first, or the object exists already."""
        return self.status == 409

    @property
    def expired(self) -> bool:
        """Whether a watch started from a resourceVersion that the server no longer keeps."""
        return self.status == 410
