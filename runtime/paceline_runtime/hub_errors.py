"""What went wrong with a download, in one line that says what to do, and never the token. No torch here."""

from __future__ import annotations

from urllib.parse import urlsplit

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from paceline_runtime.hub_settings import HubSettings
from paceline_runtime.model_errors import ModelFetchError

__all__ = ["LIBRARY_ERRORS", "fetch_error", "is_transient"]

# The first base of the library's HTTP errors is that of all errors of httpx, in whichever version the library uses it.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
LIBRARY_ERRORS = (_HTTP_ERROR, OSError, HFValidationError)
_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)


def is_transient(error: BaseException) -> bool:
    """Tell whether trying again may help: no connection, a cut one, or a server that is busy or restarting."""
    error = _cause(error)
    if isinstance(error, HfHubHTTPError):
        return _status(error) in _TRANSIENT_STATUS
    return not isinstance(error, HFValidationError)  # no answer, half an answer, or one of another size than stated


def fetch_error(error: BaseException, where: str, revision: str, settings: HubSettings) -> ModelFetchError:
    """Return the error to raise for one of the library's."""
    message = _message(_cause(error), where, revision, settings)
    return ModelFetchError(message.replace(settings.token, "…") if settings.token else message)


def _message(error: BaseException, where: str, revision: str, settings: HubSettings) -> str:
    host, known = urlsplit(settings.endpoint).netloc, settings.token is not None
    if isinstance(error, GatedRepoError):
        need = "with the account of HF_TOKEN" if known else "and set HF_TOKEN"
        return f"{where} is gated: accept its licence at {settings.endpoint}/{where.removeprefix('hf://')} {need}"
    status = _status(error)
    if status in (401, 403) and known:
        return f"{host} refuses HF_TOKEN for {where} ({status}): is it valid, and may it read this repository?"
    if isinstance(error, RevisionNotFoundError):
        return f"{where} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
        need = "the account of HF_TOKEN may not see it" if known else "it is private and HF_TOKEN isn't set"
        return f"{where} can't be fetched: {host} knows no such repository, or {need}"
    if isinstance(error, HFValidationError):
        return f"{where} isn't a repository's name: {_first_line(error)}"
    if status is not None:
        return f"{where} can't be fetched: {host} answers {status}"
    return f"{where} can't be fetched from {host}: {_first_line(error)}"


def _cause(error: BaseException) -> BaseException:
    """Return what is behind the library's "not in the cache either"."""
    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
