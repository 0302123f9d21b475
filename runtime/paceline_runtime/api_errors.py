"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}` with the right status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline_core.errors import PacelineError
from paceline_runtime.api_schema import ALTERNATIVES
from paceline_runtime.engine_client import EngineNotReady
from paceline_runtime.logs import log_event
from paceline_runtime.model_errors import ChatTemplateError, SamplingParamsError
from paceline_runtime.sequence import EngineDied

__all__ = ["ApiError", "error_body", "install_error_handlers", "invalid", "to_api_error", "unavailable"]

_TYPES = {404: "not_found_error", 429: "rate_limit_error", 401: "authentication_error"}
_RETRY_SECONDS = "1"  # an engine restart takes a second or more; asking again sooner only burns a connection


class ApiError(PacelineError):
    """Something that the client gets to know, with its HTTP status."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that can't be served as it is (400)."""
    return ApiError(400, message, code=code, param=param)


def unavailable(message: str, code: str, retry_after: str = _RETRY_SECONDS) -> ApiError:
    """Return the error of a server that can't take the request now (503)."""
    return ApiError(503, message, code=code, headers={"Retry-After": retry_after})


def to_api_error(error: Exception) -> ApiError:
    """Return what a client is told of `error`; anything unexpected is logged and stays vague."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _explain(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return invalid(f"Invalid value for {first['loc'][-1]!r}: {first['msg']}", str(first["loc"][-1]))
    if isinstance(error, SamplingParamsError):
        return invalid(str(error), error.field)
    if isinstance(error, ChatTemplateError):
        return invalid(str(error), "messages")
    if isinstance(error, EngineNotReady | EngineDied):
        return unavailable(str(error), "engine_unavailable")
    if isinstance(error, ClientDisconnect):  # within its body: nobody reads the answer, and nothing is wrong here
        return invalid("the body broke off", code="incomplete_body")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), code="http_error", headers=error.headers)
    log_event("internal_error", kind=type(error).__name__, error=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of `app` in the shape above."""

    async def handle(_request: Request, error: Exception) -> JSONResponse:
        api_error = to_api_error(error)
        return JSONResponse(error_body(api_error), api_error.status, api_error.headers)

    for kind in (PacelineError, ValidationError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, handle)


def _place(loc: tuple[str | int, ...]) -> tuple[str | None, str | None]:
    """Return the dotted name of what is wrong, and what it may be if that is one of several types."""
    for depth, part in enumerate(loc[:-1], start=1):
        if part in ALTERNATIVES:  # the rest of the place names a type that was tried, not a field
            return ".".join(str(p) for p in loc[:depth]), ALTERNATIVES[str(part)]
    return ".".join(str(p) for p in loc) or None, None


def _explain(error: ValidationError) -> ApiError:
    """Name the first field that is wrong. The value isn't repeated: it may be a prompt."""
    first = error.errors(include_url=False, include_input=False)[0]
    where, expected = _place(first["loc"])
    if expected:
        return invalid(f"Invalid value for {where!r}: expected {expected}", where)
    if first["type"] == "refused_parameter":
        return invalid(first["msg"], first["ctx"]["param"], "unsupported_value")
    if first["type"] == "model_type" and where is None:
        return invalid("the body must be a JSON object")
    if first["type"] == "json_invalid":
        return invalid(f"the body isn't valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {where}", where, "unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"Missing required parameter: {where!r}", where, "missing_required_parameter")
    said = first["msg"].removeprefix("Value error, ")
    return invalid(f"Invalid value for {where!r}: {said}" if where else said, where)
